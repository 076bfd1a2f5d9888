"""Snapshots of a running program, and ways of showing them. Knows no state and no executor."""
