"""Tools that programs offer to models: what a model is told of each, and how a call of it is run.

`offers.py` says what they are, `definitions.py` makes them of functions, types, JSON schemas and tool
servers, `running.py` runs one call. Knows no programs and no backends.
"""
