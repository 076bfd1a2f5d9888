"""What transfers over sockets share: hello, messages about rooms, streams of KV.

The decode side connects to the prefill side: one connection for messages, with signs of life in both
directions, and where KV is pushed several more for its pieces. A side that is lost, or silent for too long,
fails all rooms that it has part in; the next room connects anew.

messages < handshake . link < streams < sending . receiving < manager
"""
