/* All for one kind of processor: included once for each, with these defined: W floats in a vector; KEYS_AT_ONCE rows
 * of the product of keys and queries, and DIMS vectors of the other's, that are kept in registers; NAME(x). */

#include "vectors.h"
#include "tasks.h"
#include "panels.h"
#include "layers.h"
#include "gumbel.h"
#if W == 16 && TILES
#include "tiles.h"
#endif

#undef VF
#undef VI
#undef VU
#undef LOAD
#undef STORE
#undef W
#undef KEYS_AT_ONCE
#undef DIMS
#undef NAME
