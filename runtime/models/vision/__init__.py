"""Images for decoders. tower.py: patches -> tokens; store.py: the images that plans refer to, whose tokens
are computed once; qwen.py: the families with such a tower, as data."""
