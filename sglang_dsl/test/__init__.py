"""Where programs written for sglang import their command-line helpers from."""
