"""The HTTP server of the runtime: native, OpenAI, Anthropic and Ollama routes over one TokenizerManager.

A group of routes is a class in `app.MODULES`, whose handlers stand with their paths and OpenAPI descriptions
(`context.serves`). All requests pass the `Gate` (`http/limits.py`): API key, origin, concurrent requests,
counting, and errors in one shape (Anthropic's and Ollama's under their own paths). A body passes
`ServerContext.admit`: `body.py` bounds it and decodes strict JSON, and all but a short body
becomes a request in a thread. `sse.py` writes streams, and closes what they wait for when the client
disconnects.

The APIs feed each item's deltas to a `ReplyParser` (`formats/reply.py`: reasoning splitter, then tool-call
splitter) and render its events; `replies.py` drives them, streamed or whole. Any split of an output into
deltas gives the same events.
"""
