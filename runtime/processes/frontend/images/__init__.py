"""Pictures of requests: sources.py reads their bytes, pictures.py decodes them for the model's vision tower,
placing.py puts them into the prompt's ids."""
