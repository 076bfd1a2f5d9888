"""`s`: what a program writes to and reads from, blocking and async."""
