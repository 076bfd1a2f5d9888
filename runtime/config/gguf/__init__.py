"""GGUF: a model in one file, as llama.cpp writes it. Torch-free.

header      what a file says of itself, and where its tensors lie
settings    the same in the words of a config.json
vocabulary  the same in the words of a tokenizer.json
directory   both as files, beside a link to the weights: a checkpoint's directory like any other

What the tensors hold is known in runtime/layers/quantised/gguf.
"""
