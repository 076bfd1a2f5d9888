"""The router: one address in front of several servers: replicas, or pairs of prefill and decode.

A request passes `app` (its route), `relay` (its worker, or pair, and others if those fail), `upstream` (the
way there) and `answer` (the way back). `pool`, `policies` and `health` decide which worker it is.

It computes nothing, holds no tokenizer and no torch, and needs only the HTTP interface of its workers.
"""
