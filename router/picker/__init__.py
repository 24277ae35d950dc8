"""The endpoint picker: tells an inference gateway which router to send a request to, by the routing policy.

`service.py` listens and speaks Envoy's external processing protocol, whose messages `messages.py` reads and makes.
`picks.py` reads the request that passes the gateway, and chooses among the addresses.
"""
