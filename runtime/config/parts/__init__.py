"""Parts of a ModelSpec that only some families have. Torch-free."""
