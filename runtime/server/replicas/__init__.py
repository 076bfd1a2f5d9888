"""Replicas: `serve --engine ray`, servers that Ray Serve places, monitors, scales and restarts.

    start        connects Ray before anything that needs it is imported
    command      the driver: deploys the application, and runs the router before it
    replica      one of them, an actor with a server's processes beside it
    process      such a server, as a process of this machine
    directory    replicas announce themselves, routers ask; options by role, and the scaling policy

Requests do not pass through Ray: the router sends them to the servers over HTTP. So its policies, retries and
circuit breakers apply, and what clients send is never pickled.
"""
