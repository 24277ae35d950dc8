"""Operations: what people who run a deployment ask of a router.

service.py     ClusterService: workers, tenants, routes
explain.py     ExplainRoute: where a request would run, and what each place would cost
operations.py  operations on workers: adapters, drains, roles, moved streams
"""
