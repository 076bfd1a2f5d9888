"""The only package that knows there are processes.

A child is `python -m runtime.processes.supervise.child`: it receives its configuration over a socket pair
(`processes/supervise/channel.py`), reports `Ready`, then a heartbeat twice a second, and ends when the pair
is closed, so nothing outlives the supervisor (`lifecycle.py`). The scheduler reports the size of its KV pool
when it is ready, and the supervisor sends that to the others, which have loaded meanwhile. A child that ends,
or hangs (no heartbeat, or a loop that does not turn, for `heartbeat_timeout_s`; a forward pass that takes
`step_timeout_s`) fails the group: the supervisor puts `GroupFailed` into each worker's mailbox, the frontends
answer everybody who waits, the rest is ended. An HTTP worker alone is replaced, and the scheduler cancels
what it had asked for.
`tutorials/decisions/003-processes-over-zmq.md` says why they are subprocesses. `sglang_dsl.Runtime` starts
the same command and knows it by HTTP only.
"""
