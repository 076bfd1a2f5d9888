"""The HTTP server of the runtime: native, OpenAI, Anthropic and Ollama routes over one TokenizerManager.

HTTP (`runtime/server`): a module of routes has `routes(ctx)` and a table `OPENAPI`, and is a line in
`app.MODULES`. All pass the `Gate` (`limits.py`): API key, no pages of other origins, requests at once,
counting, and errors in one shape (Anthropic's and Ollama's under
their own paths). A body passes `ServerContext.admit`: `admission.py` counts what it holds, `body.py` reads
strict JSON and takes null and false for what is not known, and all but a short body becomes a request beside
the event loop. `sse.py` writes streams and closes what they wait for when the client goes.

Replies (`formats/reply.py`): the APIs feed each item's deltas to a `ReplyParser` (reasoning splitter,
then tool-call splitter) and render its events; `server/replies.py` drives them, streamed or whole. Where
the reasoning ends is found once, by `ReasoningBoundary` of the frontend, in the ids where the mark is a token
of its own; `splitter.py` cuts the text there, for the language too. Any split of an output into deltas
gives the same events.
"""
