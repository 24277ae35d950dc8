"""The endpoint picker: tells an inference gateway which router to send a request to, by the routing policy.

`server.py` listens; `service.py` speaks Envoy's external processing protocol, whose messages `messages.py` reads and
makes. `body.py` reads the request that passes the gateway, `picks.py` chooses, and `endpoints.py` has the addresses.
"""
