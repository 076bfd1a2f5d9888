"""The few helpers that programs of the language import from sglang's server package, under its module names.
Holds no code of its own: each module names where a thing lives here."""
