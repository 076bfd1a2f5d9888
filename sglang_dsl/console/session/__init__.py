"""A session: `s` on a backend, cells of Python that write to it, and what can be done with these (commands).
Knows no terminal and no notebook: what shows it is a View.

    session.py   the state, its moments: run a cell, undo, retry, another backend
    cell.py      one cell's Python: compiled, run, its value, its errors
    follow.py    tells a View what the state says, while it says it
    commands.py  `:undo`, `:save`, ...: a table of names to functions
    tables.py    what the commands show
    saved.py     a session as a file, and back; nothing in it is run
    export.py    a session as a program, or as a notebook
    opening.py   a backend by name, opened beside whoever waits
    interrupts.py  what Ctrl-C may stop, and what is finished first
"""
