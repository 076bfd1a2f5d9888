"""Which requests run, token by token; decides in ints, and imports no torch.

One thread calls it, tick by tick (`scheduler/loop.py`). With `overlap` (the default on a GPU, and with the
runner in its own process) a tick first ends the step under way, then plans and launches the next, and tells
the news of the ended one only after that: while the model computes, the CPU fills masks, takes requests in,
lets in those for whom there is room, and posts news. What stays between two passes is what the next plan
needs. Outputs are the same either way.

- Who comes in (`validator.py`, `running_batch.py`, `admission.py`): a policy orders the queue, whoever
  waited very long first, and among clients the next one is of the client that was given least (`flows.py`).
  The `PrefillAdder` lets in who fits the budget of prompt tokens, and the slots
  that running requests are expected to need (a share of their `max_new_tokens` that falls while all goes
  well and jumps up after a retraction). A request whose uncached prefix is being computed by another one
  waits for it: forked branches compute their prefix once. Long prompts are computed in chunks, in the same
  steps as others' next tokens unless `mixed_prefill` is off.
- Who goes: when the pool is full, first what sessions keep, then the request that has produced least is
  retracted: it keeps its output and goes to the front of the queue. The last one alone in the pool fails
  with a message. With the policy `priority`, clearly higher requests take the places of lower ones, each at
  most `max_preemptions` times.
- Stages (`stage.py`): when a request is let in, has its prompt computed and ends, a `Stage` is called. The
  plain one does prompts and decoding. One that only computes prompts exports their pages when they are done
  and ends the request; one that only decodes adopts them before it lets the request in
  (their leases stand in `CacheManager.transfers` until then).
- What the cache forgets (`cache/radix.py`): unlocked leaves, in the order of the eviction policy.
  There is one tree per `extra_key` (a `cache_salt` is part of it), so requests with different ones share
  nothing.
- Adapters (`requests/adapters.py`): each has a number, which is part of its requests' key. Running
  requests have at most `max_loras_per_batch` different ones; who waited OVERDUE_TICKS for a place is next.
- Sessions (`sessions.py`): a tree of turns by name; a request that names one becomes a whole prompt
  here, and the cache makes it cheap. A streaming session also keeps its last turn locked while there is
  room.
- Pause: no plans until resumed; requests are cancelled, stay in place, or are retracted and the cache
  flushed.
- The account of slots is checked when idle and every 512 ticks. Where it is wrong it starts anew, is
  logged and counted (`num_repairs_total`); who runs is computed again, and nobody fails.

An encoder has a scheduler of its own (`embedding_scheduler.py`): whole texts, one pass each. A decoder's
vector is a generation of no tokens that shows its last hidden state, beside all others in the same scheduler.
What both do with their requests stands in `scheduler_base.py`.
"""
