"""Prompts computed by one engine, tokens decoded by another.

transfer/: how KV gets from the pool of the one to that of the other.
"""
