"""Snapshots of a running program, and their forms in a terminal, a notebook, a diagram and a file."""
