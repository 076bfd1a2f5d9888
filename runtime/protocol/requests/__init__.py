"""Users' requests; import them from `runtime.protocol.io_struct`."""
