"""Following a program without a backend: its tree, its plan, its constraints."""
