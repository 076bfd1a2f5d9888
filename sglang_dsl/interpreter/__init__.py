"""Running a program: nodes are lowered, evaluated over a transcript, and answered by a backend.

Seeds and records. A call's seed follows from the run's seed and from where the call stands, its key in
a record from what is asked: `tutorials/decisions/006-seeds-and-records-by-place-and-content.md`.

Quick paths. Constant text waits in the state and goes into the queue with the next generation; `gen`
gives the same frozen node at the same line for the same words. What needs no backend is folded without a
coroutine; queue entries, transcripts, calls and their answers are msgspec structs outside the garbage
collector; signals take no lock; calls share the timers of their deadlines; one wake-up of the loop begins
all programs that came meanwhile; batch threads are called one at a time, so bodies that do not block share
a few.

Ends. A branch that loses, a program that is cancelled and a stream that is left cancel their tasks; the
task's end reaches the backend, which aborts its request. A stream's body writes through a face of its own,
so that the reader's is garbage when nobody can read it any more; a finalizer then stops the run. No thread
belongs to a state or to a fork.
"""
