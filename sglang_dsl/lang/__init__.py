"""The language under the module names that programs written for sglang import from. Holds no code of its own:
each module names where a thing lives here."""
