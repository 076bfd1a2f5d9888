"""Users' requests for text and for vectors, for one prompt or many. Import them from
`runtime.protocol.io_struct`.
"""
