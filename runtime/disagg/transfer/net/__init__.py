"""What transfers over sockets share: handshake, messages about transfers, streams of KV.

The decode side connects to the prefill side: one connection for messages, with heartbeats in both directions,
and, if KV is pushed, several more for its pieces. When a side is lost, or silent for too long, all its
transfers fail; the next transfer connects anew.

messages < handshake < streams < link < side < sending . receiving < manager
"""
