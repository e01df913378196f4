"""Typed messages between the server's processes and the ZMQ sockets that carry them.

One module per direction, each with the messages of that direction and its two socket ends:

    api_to_engine     requests, aborts, control          N API processes PUSH -> engine PULL
    engine_to_api     tokens, finish reasons, stats      engine PUSH -> one PULL per API process
    engine_to_worker  one scheduled step                 engine PUSH -> worker PULL (one per rank)
    worker_to_engine  readiness, sampled tokens          worker PUSH -> engine PULL

Sockets are `ipc://` files in the server's private 0700 runtime directory. Everything is msgpack through msgspec with
closed types: bytes that do not decode to the direction's union raise `msgspec.DecodeError`; nothing is unpickled.
"""
