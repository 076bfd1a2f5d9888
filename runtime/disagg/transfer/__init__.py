"""KV of one prompt from the pool of one engine (prefill) to the pool of another (decode).

Both sides name the request by its room, a number. The prefill side makes a KVSender for it, the decode side a
KVReceiver, and both poll: nothing here blocks whoever schedules. Only the receiving side ever writes into its
pool, and only until its receiver has ended; what a sender was given is read until its sender has ended. So
both may free their slots as soon as poll() says Success or Failed.

base: the contract. memory: access to a pool's bytes. metadata: what travels beside the KV. table: the
transfers by name. It knows slots and bytes; not requests, caches or schedulers, and loads no torch.
"""
