"""The workers as this router sees them.

calls.py    WorkerCalls: the Prefill, Decode and Release calls of one request
role_calls.py  a call of a role to one worker after another, until one has answered
handle.py   WorkerHandle: one worker's stubs, health and load; its calls share a stream if it offers that
corrected_load.py  CorrectedLoad: a worker's load between its reports
cluster.py  Cluster: all registered workers, and the models that they serve
loras.py    which adapter a name stands for, and the reports of adapters
lora_operations.py   LoraOperations: what operators do with adapters, on all workers
worker_operations.py   WorkerOperations: what operators do with one worker: move its decodes, drain it, change its role
offer.py    Offer: what all of this offers, for GetServerInfo
destinations.py    Destination: what a decode worker allocates before the prompt is computed
prefix_sources.py  where a worker is to borrow the beginning of a prompt, and what came of it
prefetches.py      Prefetch: a decode worker reads KV while its prompt is computed
corrected_load.py  a worker's load between its reports
replies.py  checks what workers answer, and suspends those that answer wrong
report_stream.py   ReportStream: whether the reports of a worker are lost
destinations.py  what a decode worker has allocated before the prompt is computed
prefetches.py    a decode worker that reads KV while its prompt is computed
spans.py    the attributes of spans that name workers
aborts.py   stops calls on workers
"""
