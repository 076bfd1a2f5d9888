"""`lang.backend`: backends under the module names that sglang's programs import from. Holds no code of its
own."""
