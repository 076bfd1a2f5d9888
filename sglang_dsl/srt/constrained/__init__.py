"""Where programs written for sglang import the regex of a model from."""
