"""Options of the processes in front of engines: the server, its replicas, the router."""
