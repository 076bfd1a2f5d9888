"""Pictures for decoders. tower.py: patches -> tokens; store.py: the pictures that plans name, their tokens
made once; qwen.py: the families that have such a tower, as data."""
