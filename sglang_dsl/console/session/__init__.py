"""A session: `s` on a backend, cells of Python that add to it, and commands. Knows no terminal and no
notebook: a View shows it.

    session.py     runs cells; undo, retry, another backend
    cell.py        one cell: compiled, run, its errors
    follow.py      reports to a View what the state generates, while it does
    commands.py    `:undo`, `:save`, ...
    files.py       a session as a file, and back; as a program or a notebook
    interrupts.py  what Ctrl-C may stop
"""
