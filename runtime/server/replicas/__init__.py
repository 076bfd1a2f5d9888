"""Replicas: `serve --engine ray`, servers that Ray Serve places, monitors, scales and restarts.

Requests do not pass through Ray: the router sends them to the servers over HTTP. So its policies, retries and
circuit breakers apply, and what clients send is never pickled.
"""
