"""Starting programs: one, in the background or not, or many."""
