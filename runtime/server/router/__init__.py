"""The router: one address in front of several servers: replicas, or pairs of prefill and decode.

    command.py    `python -m runtime router`
    app.py        its routes: which requests go to one worker, which to all
    relay.py      one request on its way to a worker, or to a prefill and a decode server, and to others when
                  those fail
    answer.py     passes a worker's answer on to the client; merge.py: of two answers
    upstream.py   requests to the workers, with their key, over connections that are kept
    pool.py       the workers: load, circuit breakers, sessions; what of a body the choice depends on
    health.py     probes each worker
    policies.py   how to choose
    metrics.py    what it counts

It computes nothing, holds no tokenizer and no torch, and needs only the HTTP interface of its workers.
"""
