"""Mailboxes between the parts of the pipeline: in memory, over a socket pair, or over a Unix socket.

A message (`wire.py`) is msgpack `[version, tag, struct]`; each mailbox has a closed list of structs.
"""
