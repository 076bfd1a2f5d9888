"""The processes of a server: how they start, are watched and end, and the work of each.

A child that ends or hangs fails the group: the supervisor sends `GroupFailed` to each HTTP worker, which
answers its requests with it. An HTTP worker alone is replaced.
"""
