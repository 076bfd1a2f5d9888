"""What shows a session and reads what the user types: a terminal, or IPython and its notebooks.

terminal.py  the loop of the prompt, and of `chat`
screen.py    a View: turns and answers while they are generated, forks as a tree
shell.py     the prompt on IPython
prompt.py    plain lines, and messages of a chat
ipython.py   %sgl and %%sgl
"""
