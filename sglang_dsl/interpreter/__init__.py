"""Running a program: nodes are lowered, evaluated over a transcript, and answered by a backend.

Seeds and records. A call's seed is derived from the run's seed and the call's position, its key in a record
from its content: `tutorials/decisions/006-seeds-and-records-by-place-and-content.md`.

Fast paths. Constant text is held in the state and goes into the queue with the next generation; `gen` returns
the same frozen node for the same line and arguments, and a node is lowered once. What needs no backend is
evaluated without a coroutine; queue entries, transcripts, calls and their answers are msgspec structs outside
the garbage collector; signals take no lock; calls share the timers of their deadlines; one wake-up of the
loop begins all programs added meanwhile; batch threads are woken one at a time, so functions that do not
block share a few.

Ends. A losing branch, a cancelled program and a dropped stream cancel their tasks; the backend then aborts
the request. A stream's function writes through a state object of its own, so that the reader's is garbage
when its last reader is gone; a finalizer then stops the run. No thread belongs to a state or to a fork.
"""
