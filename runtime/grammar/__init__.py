"""Constrained decoding: which tokens may follow.

A `Constraint` (regex, json_schema, ebnf, structural_tag, choices) becomes a `Matcher` (`grammar/base.py`)
in a worker of the `GrammarManager`, while its request waits beside the others. `grammar/backends/auto.py`
picks the backend: regexes and choices go to the project's own byte DFA (`outlines_backend.py`), the rest to
llguidance, and what that cannot read to XGrammar.

- Schemas. `grammar/json_schema/` reads a schema before any engine does: every keyword is kept exactly,
  or the schema is relaxed and a validator asked when a value closes (`CheckedMatcher`), or it is refused
  with keyword and place. Nothing is ignored silently; what the standard itself says to ignore is in the
  matcher's `origin`, misspelt keywords with it (`unknown_keywords.py`). Masks offer one spelling of a
  value: properties in the schema's order, raw characters, the shortest numbers. `checks/closing_tokens.py`
  tells in bulk which tokens may end a checked value. The library's lexer is shared by all who follow a
  schema, and fails for good where it meets its bounds: then all get a new one (`llguidance_parser.py`). The
  backend `outlines` reads the schemas that a regular expression keeps (`schema_regex.py`, over
  outlines-core).
- Our own automata. Regex or choices -> language tree -> `CharDfa` -> `ByteDfa`: states of characters
  times nodes of a UTF-8 table. A mask is made when its state is first visited; states from which tokens
  lead on alike, as in the middle of a long repeat, share one (`ByteDfa.alike`). Where most characters may
  follow, tokens are walked along a `MergedTrie`, in which bytes that the automaton does not tell apart
  share a path, and of a wide repeat's characters (`ByteDfa.runs`) only the number counts; those of a kind
  are shared by constraints, and `MaskStore` can keep them on disk (`grammar_cache_dir`). The walk is in C
  (`masks/native_walk.py`), and in numpy where no compiler made the library. What is too large goes to
  llguidance.
- In the scheduler all of this stands in `scheduler/guided/`, behind `guided/decoding.py`; what it knows
  of a request is its `Guide` (`scheduler/requests/components.py`), which nobody else writes.
- Backtracking. `scheduler/guided/liveness.py` takes output back where nothing may follow it
  (`Matcher.verdict`, `retract`; `CacheManager.cut` shortens the lease, below what it published if need be),
  in bounds, and leads an output to an end before `max_new_tokens` runs out, along ids that
  `grammar/completion.py` has found, or that spell an example of the schema (`json_schema/examples.py`);
  only what cannot be taken back is streamed. `missing_bytes.py` does the same for vocabularies that lack
  single bytes; both stand on `backtracking.py`.
- Who waits. Overlapped, and beside free requests, what a sampled token forces and whether its output
  can still be completed is asked while the next pass runs (deferred grammar advance, `guided/decoding.py`);
  where the answer changes something, that row is void. Once the pass has ended (`Runner.done`) advances and
  masks that are not there yet wait for the next one, and their requests with them; a search for a
  completion is interrupted between two pieces (`Matcher.closing_steps`) and goes on then. What passes take
  longer than plain ones of as many rows would is a deficit of the constrained requests
  (`guided/throttle.py`), and while it lasts they skip passes, three of four at most. So free requests come
  about as far beside constrained ones as beside free ones. None of this changes an output.
- Jumps. `jump_plan.py` decides which tokens of forced text are certain, given what may follow; with
  jump-forward off the same tokens are sampled one by one (`Guide.pending`). `healing.py` chooses the end of
  a prompt anew. Decision 005.
- Reasoning. `reasoner.py` lets a grammar sleep until the reasoning ends;
  `processes/frontend/prepare.py` decides per request, by what it says, its prompt's end and the template;
  `scheduler/guided/decoding.py` wraps the matcher.
- Manager. A compilation that passes its deadline keeps its thread, and another takes its place; what is
  compiled is kept within counts and bytes; `POST /precompile` and traced programs send constraints ahead.
- `ebnf/reading.py` reads GBNF for both engines. `ebnf/terminals.py` finds which parts of a recursive
  grammar a lexer may read, longest match first (`ebnf/overlap.py` compares them). `llguidance_space.py` is
  a vocabulary prepared for the library. `tags/` is a machine of its own over any backend's matchers;
  `server/output_format.py` is the only place that knows under which names clients ask for a constraint.
- `byte_matcher.py` shows any of them byte by byte, for tests and for people.
"""
