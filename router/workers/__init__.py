"""The workers as this router sees them.

calls.py    WorkerCalls: the Prefill, Decode and Release calls of one request
handle.py   WorkerHandle: one worker's stubs, health and load; its calls share a stream if it offers that
corrected_load.py  CorrectedLoad: a worker's load between its reports
cluster.py  Cluster: all registered workers, and the models that they serve
loras.py    KnownLoras: the adapters of a worker; which one a name stands for
lora_operations.py   LoraOperations: what operators do with adapters, on all workers
model.py    ServedModel: a model's tokenizer, limits and capabilities
offer.py    Offer: what all of this offers, for GetServerInfo
destinations.py    Destination: what a decode worker allocates before the prompt is computed
prefetches.py      Prefetch: a decode worker reads KV while its prompt is computed
report_stream.py   ReportStream: whether the reports of a worker are lost
destinations.py  what a decode worker has allocated before the prompt is computed
prefetches.py    a decode worker that reads KV while its prompt is computed
aborts.py   stops calls on workers
"""
