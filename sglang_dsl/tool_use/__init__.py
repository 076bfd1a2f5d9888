"""Tools that programs offer to models: offers.py is what a state offers, definitions.py makes tools of
functions, types, JSON schemas and tool servers, and running.py runs a call.
"""
