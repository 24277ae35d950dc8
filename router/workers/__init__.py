"""The workers as this router sees them.

cluster.py       Cluster: the registered workers, and the models that they serve
members.py       Members: watches each registered worker until it leaves; its model card
handle.py        WorkerHandle: one worker's stubs, health and load; its calls share a stream if it offers that
calls.py         WorkerCalls: the Prefill, Decode and Release calls of one request
decode_calls.py  DecodeCall, AdoptedDecode: running decodes as their router reads them; KeptReader
role_calls.py    a call of a role to one worker after another, until one has answered
destinations.py  Destination, Prefetch: what a decode worker allocates and reads early; where it may borrow
serialized_prompt.py  the bytes of a long prompt, of which requests are put together
replies.py       checks what workers answer, and suspends those that answer wrong
cancellation.py  stops a request on all its workers, and here
loras.py         which adapter a name stands for, and the reports of adapters
offer.py         Offer: what all of this offers, for GetServerInfo
text_limits.py   limits on the texts of large requests, by the models, before they are parsed
spans.py         the attributes of spans that name workers

watching/    one worker as its router watches it: health, load, and the calls that wait for it
"""
