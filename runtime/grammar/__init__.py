"""Constrained decoding: which tokens may follow.

A `Constraint` (regex, json_schema, ebnf, structural_tag, choices) becomes a `Matcher` (base.py) on a thread
of the `GrammarManager`. `table.py` picks the backend: regexes and choices go to the project's own byte DFA
(`automata`, `masks`), the rest to llguidance, and what that refuses to XGrammar.

- `json_schema` reads a schema first: every keyword is kept exactly, or left to a validator that checks values
  as they close (`CheckedMatcher`), or refused with its path. Properties come in the schema's order.
- Masks are computed when a state is first visited, by C (`masks/native_walk.py`) or numpy, and shared.
- `completion.py` finds ids that end an output; `backtracking.py` takes output back at a dead end.
- `jump_plan.py` decides which tokens of forced text are certain; `healing.py` renews the end of a prompt.
- `tags` mixes free text with constrained parts; `reasoner.py` suspends a constraint during the reasoning.

In the scheduler all of this is in `scheduler/guided/`.
"""
