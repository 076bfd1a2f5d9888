"""Communication between the parts of the pipeline.

Mailboxes (`ipc/`): both ends of a mailbox are created from its `Address`: in memory, one end of a socket
pair, a Unix socket, or TCP, which needs the run's key (CURVE; generated for connections on this machine,
given for others). A socket pair takes 28 us of CPU for a plan and its result, a Unix socket 70, TCP 90.
`Ranks` sends to several receivers and gathers their answers; errors name the rank that is gone or late.

Wire (`ipc/wire.py`): a message is msgpack `[version, tag, struct]`; the struct is one of a closed list that
each mailbox has. Another version or an unknown tag is an error; an inbox logs, counts and drops such a
message. A sender waits for a full queue until its deadline. A socket is in a folder that only this user can
enter, and its inbox checks that.

Plans and results (`ipc/plans.py`) travel over a socket pair; the constant parts of a sequence are sent once;
masks are in anonymous shared memory. If a step takes too long, the runner is killed; its end ends the
scheduler, with the reason; the system ends the runner with its parent. A small model computes in the
scheduler's process (`runner_process`: on Linux, with at least two cores and more than 10 million weights, it
has its own).
"""
