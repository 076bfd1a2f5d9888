"""Pictures of requests: sources.py has their bytes from where a request says, pictures.py makes pixels of
them for the model's vision tower, placing.py puts them into the prompt's ids."""
