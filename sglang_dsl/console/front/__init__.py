"""What shows a session and reads what the user types: a terminal, or IPython and its notebooks."""
