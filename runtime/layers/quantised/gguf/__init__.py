"""Weights in GGUF files: `blocks` decodes ggml's types, `checkpoint` reads a model's tensors."""
