"""Weights in GGUF files: `blocks` knows what ggml's types hold, `checkpoint` where a model's tensors are."""
