"""What becomes of a reply: its reasoning kept apart, asked for again where it is no value, its calls run."""
