"""Options of what stands in front of engines: the server, its replicas, the router."""
