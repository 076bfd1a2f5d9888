"""From a request to its output: the frontend of the pipeline.

`TokenizerManager` is all that routes, `Engine` and observers know of the engine. Every call is a
`BatchRequest`, of one or many items: it prepares each item (`prepare.py`, `embedding.py`), sends it under an
id that the engine never sees twice, and keeps a `RequestState` until its caller has the answer. With `n > 1`
a prompt is first committed to the prefix cache by a request for no tokens, then its samples are sent. A
caller that leaves (a cancelled task, a closed stream, a disconnected client) aborts its requests. Answers
find their frontend by `http_worker_ipc`. Control verbs (`protocol/control.py`) take the same way and are
answered by one `ControlOutput`.

An output travels in deltas, from the scheduler to its reader. An `OutputAccumulator` adds up those between
two readings: of a stream the few since the last one, of any other request all. `Engine.stream` gives all so
far each time, because programs expect it; `Engine.stream_deltas` does not.
"""
