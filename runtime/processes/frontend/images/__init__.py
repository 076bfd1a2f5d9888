"""Pictures of requests: sources.py reads their bytes, pictures.py decodes them and puts them into the
prompt."""
