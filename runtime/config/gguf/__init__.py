"""GGUF: a model in one file, as llama.cpp writes it. Torch-free.

header      a file's metadata, and the positions of its tensors
settings    the metadata as a config.json
vocabulary  the metadata as a tokenizer.json
directory   both as files, beside a link to the weights: a checkpoint directory like any other

runtime/layers/quantised/gguf decodes the tensors.
"""
