"""What the words of the language are made of."""
