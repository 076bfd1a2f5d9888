"""Starting programs: one, beside its caller, or many."""
