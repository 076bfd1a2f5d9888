"""KV of one prompt from the pool of one engine (prefill) to the pool of another (decode).

Both sides know a transfer by the request's bootstrap id (`bootstrap_room`). The prefill side creates a
KVSender for it, the decode side a KVReceiver, and both poll: nothing here blocks the scheduler. Only the
receiving side writes into its pool, and only until its receiver has ended; slots passed to a sender are read
until that has ended. So both may free their slots as soon as poll() returns Success or Failed.

kv_manager: the contract, and the transfers by name. memory: access to a pool's bytes. metadata: what is sent
beside the KV. It knows slots and bytes; not requests, caches or schedulers, and loads no torch.
"""
