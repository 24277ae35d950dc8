"""The routers of a fleet among each other: what they share is decided by one of them, the home (docs/tenancy.md).

membership.py  the registered routers, and which of them is the home of a tenant or of a model's places
quorum.py      which router lends a tenant's quota: the one that more than half of them support
link.py        calls to another router, of which each carries all that waits
service.py     PeerService: what this router answers as a home; how it serves and registers itself
tenants.py     the tenants of all routers, for operators
"""
