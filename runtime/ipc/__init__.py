"""How the parts of the pipeline talk.

Mailboxes (`ipc/`): both ends of a mailbox are made from its `Address`: in memory, one end of a socket
pair, a Unix socket, or TCP, where the key of the run is needed (CURVE; made anew for this machine alone,
given for any other). A socket pair takes 28 us of CPU for a plan and its result, a Unix socket 70, TCP 90.
`Ranks` is the end that sends to several and gathers what they answer; a rank that is gone or late is named.

Wire (`ipc/wire.py`): a message is msgpack `[version, tag, struct]`, the struct one of a closed list,
which each mailbox has. Another version or an unknown tag is an error that says so; in an inbox it is
logged, counted and dropped. A sender waits for room until its deadline, a socket lies in a folder that only
this user can enter, and its inbox checks that.

Plans and results (`ipc/plans.py`) cross a socket pair, what a sequence keeps only once; masks lie in shared
memory without a name. A step that takes too long kills the runner; its end ends the scheduler with the
reason; the system ends it with its parent. A small model computes in the scheduler's process
(`runner_process`: on Linux, with two cores or more and more than 10 million weights, it has one of its own).
"""
