"""Admission control: which requests may run on workers, and when. docs/admission.md and docs/tenancy.md describe it.

controller.py  AdmissionController: quotas, queue and deadline of each request
quotas.py      the tenants' quotas, as this router uses them
quota_waits.py the waits of requests for a quota
quota_state.py a tenant's quota at one router: its last loan and its demand
ledger.py      the buckets of the tenants whose home is this router
queue.py       the requests of each model that run or wait
fair_queue.py  the order of those that wait: fair to tenants, or by priority
lanes.py       the tenants of that order, and their waiting requests
places.py      the places on workers, which all routers share
peers.py       the other routers, as admission control sees them
predictor.py   how long a request would take
"""
