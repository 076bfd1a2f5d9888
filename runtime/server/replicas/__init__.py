"""Replicas: `serve --engine ray`, servers that Ray Serve places, watches, scales and restarts.

    command      the driver: deploys the application, and runs the router before it
    application  what Ray Serve is told: how many, where, when it is well
    replica      one of them, an actor with a server's processes beside it
    roles        what the servers of a replica are told: one, or a prefill and a decode server
    process      such a server, as a process of this machine
    directory    who is there: replicas announce themselves, routers ask
    scaling      how many there should be, by the requests that the servers have in hand

Requests do not pass through Ray: the router sends them to the servers over HTTP, as to any others. So its
policies, retries and circuit breakers hold, and no pickle is made of what a client sent.
"""
