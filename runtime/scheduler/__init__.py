"""Which requests run, token by token; decides in ints, and imports no torch. One thread calls it, tick by
tick (`loop.py`).

- Admission (`admission.py`, `running_batch.py`): a policy orders the queue, requests that waited very long
  first, and among clients the next request is of the client that was served least (`queues.py`). The
  `PrefillAdder` admits requests within the budget of prompt tokens, and of the slots that running requests
  are expected to need. A request whose uncached prefix is being computed by another one waits for it: forked
  branches compute their prefix once. Long prompts are computed in chunks, in the same steps as others' next
  tokens unless `mixed_prefill` is off.
- Retraction: when the pool is full, first the slots kept for sessions are freed, then the request that has
  produced least is retracted: it keeps its output and goes to the front of the queue. With the policy
  `priority`, clearly higher requests preempt lower ones.
- Stages (`stage.py`): hooks at a request's ends. A prefill stage sends the KV of prompts and ends the
  request; a decode stage receives it before the request is admitted.
- Eviction (`cache/radix.py`): unlocked leaves, in the order of the eviction policy. There is one tree per
  `extra_key` (a `cache_salt` is part of it), so requests with different ones share nothing.
- Sessions (`sessions.py`): a tree of turns by name; a request that names one becomes a whole prompt here,
  most of which is in the cache.
- Pause: no plans until resumed; requests are cancelled, stay in place, or are retracted and the cache
  flushed.
- The account of slots is checked when idle and every 512 ticks. If it is wrong it starts anew, is logged and
  counted (`num_repairs_total`); running requests are computed again, and none fails.

An encoder has a scheduler of its own (`embedding_scheduler.py`): whole texts, one pass each. A decoder's
vector is a generation of no tokens that returns its last hidden state, in the same scheduler as all others.
"""
