"""From a request to its output: the frontend of the pipeline.

Frontend (`processes/frontend/tokenizer_manager.py`): the only thing that routes, `Engine` and observers
know of the engine. It checks a request (`prepare.py`), gives it an id that is never used twice in the
engine, keeps a `RequestState` per request and hands out what comes back, to any thread and any event loop.
Every call is a `BatchRequest` (`batch_request.py`), of one or of many: with `n > 1` a prompt is first
committed to the prefix cache by a request for no tokens, then its samples are sent. Whoever leaves (a
cancelled task, a closed stream, a disconnected client) aborts what it asked for. Answers find their
frontend by `http_worker_ipc`. Questions and orders (`protocol/control.py`) take the same way and are
answered by one `ControlOutput`.

Deltas. An output travels as what is new, from the scheduler to its reader. An `OutputAccumulator` adds
up what comes between two readings: of a stream the few deltas since the last one, of any other request all
of them. `Engine.stream` gives all so far each time, because programs expect it; `Engine.stream_deltas` does
not. `/generate` keeps what it has sent as JSON and adds to it.
"""
