"""What shows a session and reads what is typed: a terminal, or IPython and its notebooks. Decides nothing
about states.

terminal.py  the loop of the prompt, and of `chat`
screen.py    a View: turns, answers as they come, forks while they run
forks.py     branches as a tree
shell.py     the prompt on IPython
prompt.py    plain lines, and messages of a chat
banner.py    what stands above the first prompt
ipython.py   %sgl and %%sgl
"""
