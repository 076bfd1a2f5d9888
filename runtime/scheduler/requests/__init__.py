"""A request while it runs: its state and components, when its output stops, its deadline.

Knows no queue, no batch and no cache.
"""
