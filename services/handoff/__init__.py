"""Handoffs of KV from worker to worker, each under a lease.

service.py         the owner's side: HandoffService and the pools it offers
leases.py          the owner's table of leases
early.py           the owner's side of handoffs that begin while the prompt is computed
remote_handoff.py  handoffs as readers see them, read and checked
pull.py            the reader's side: reserve, pull, confirm
prefetch.py        the reader's side of handoffs that begin while the prompt is computed
fetcher.py         the reader's side where engines transfer KV themselves
spans.py           spans of the stages, from the engine's own times
destinations.py    the blocks of such engines that are allocated before the prompt is computed
remote_lease.py    a lease as its reader keeps, confirms or gives it up
lending.py         the owner's side of loans from its prefix cache, and digests of what it holds
borrowing.py       the reader's side of such loans
opening.py         the reader's side before handoffs: pools of registered peers, opened ahead
peers.py           channels to owners, and their pools
"""
