"""A session: `s` on a backend, cells of Python that add to it, and commands. A View shows it."""
