"""The router: one address in front of several servers: replicas, or pairs of prefill and decode.

    command.py    `python -m runtime router`
    app.py        its routes: which requests go to one worker, which to all
    relay.py      one request on its way to a worker, and to another one when that fails
    pair.py       the same with a prefill and a decode server, another pair when one of them fails
    answer.py     how a worker's answer becomes the client's; events.py, merge.py: of streams, of two answers
    upstream.py   requests to the workers, with their key; client.py: HTTP over connections that are kept
    pool.py       the workers: load, circuit breakers, sessions; chooses by a policy
    health.py     looks at each worker now and then
    policies/     how to choose: one file each
    prompt.py     what of a request's body the choice depends on
    metrics.py    what it counts

It computes nothing, holds no tokenizer and no torch, and needs nothing of a worker but its HTTP interface.
"""
