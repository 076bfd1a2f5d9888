"""Beside the language: terminal session, demo, servers of the program's own."""
