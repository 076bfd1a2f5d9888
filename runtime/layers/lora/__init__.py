"""LoRA (arXiv 2106.09685): y = x W^T + scale * (x A^T) B^T, with another A and B for each request of a batch.

linear.py   a LinearMethod around another one, and the adapters of the current pass
peft.py     an adapter as peft writes it: adapter_config.json and adapter_model.safetensors
"""
