"""Operations: what people who run a deployment ask of a router.

service.py     ClusterService: workers, tenants, routes
explain.py     ExplainRoute: where a request would run, and what each place would cost
loras.py       adapters: listed, loaded and unloaded on all workers of a model
workers.py     one worker: its decodes are moved away, it is drained, its role changes
"""
