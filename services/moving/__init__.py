"""Running decodes that go on on another worker, with their KV.

running.py   the decodes of this worker, which yield or lend their KV under leases
shedding.py  how many of them are to go elsewhere, which this worker's load tells to routers
roles.py     a change of the worker's roles while it serves
role_claim.py  the claim under which a worker gives a role up: never the last one of a model
"""
