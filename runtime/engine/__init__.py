"""The model, and how its logits are used: plans as tensors (batch), passes (runner, graphs, lookahead), draws
(sampling). If several processes share a model, each is a `TorchRunner` with the same plans."""
