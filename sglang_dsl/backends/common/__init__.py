"""Shared by several backends: HTTP, errors, options, streams."""
