"""The functions that programs are written with: generations and media."""
