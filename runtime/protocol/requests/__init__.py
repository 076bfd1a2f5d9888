"""Requests for text and for vectors, for one prompt or many, and how one of many becomes several of one.

Others read them from `runtime.protocol.io_struct`.
"""
