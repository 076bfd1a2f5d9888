"""From a request to its output. `TokenizerManager` is all that routes, `Engine` and observers know of the
engine.

A caller that leaves (a cancelled task, a closed stream, a disconnected client) aborts its requests. Outputs
travel in deltas, which an `OutputAccumulator` adds up between two readings.
"""
