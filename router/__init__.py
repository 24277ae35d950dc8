"""The router: `python -m router CONFIG`. The request path, in the order of reading:

service.py       the gRPC service of clients: one context for each request, then the pipeline
context.py       RequestContext: deadline, stats, fault plan; the running requests, what begins and ends each
qos.py           the tenant and the priority of a call; which tenants have accounts of their own
pipeline.py      a request: validate, tokenize, admit, encode, execute
execution.py     a request on its workers: prefill, handoff, decode; continues elsewhere when a worker fails
answers.py       several answers to one prompt
validation.py    checks of requests, defaults of sampling
tokenization.py  the RPCs Tokenize and Detokenize
sessions.py      what requests say of prefix caches: retention, sessions and their ends
request_path.py  what answers requests, by whatever protocol they come
server.py        assembles a router and serves it; config.py is its configuration

embedding/   requests for embeddings of texts
drawing/     requests for pictures
admission/   quotas, the waiting queue, predicted deadlines
peers/       the other routers of a fleet, which share quotas and places with this one
processes/   a router of several processes behind the same ports
kserve/      KServe's protocol, for Triton's clients
openai/      OpenAI's API over HTTP
resume/      kept answers, which any router goes on with
recording/   records of requests that have ended
picker/      the endpoint picker of inference gateways
moving/      running decodes that go to other workers with their KV
anthropic/   Anthropic's, beside it
stream/      the answer: messages, unary responses, trailing timings
text/        tokenizer, chat templates, detokenizer, stop strings
multimodal/  media: validation, encoding, the embedding cache, prompts with media
decoding/    a request while workers compute it: its state, its decode as it is read, where it continues
routing/     which workers a policy chooses: filters, policies, costs, retries
placement/   routing applied to the cluster: the placer, encode workers, KV events
operators/   the gRPC service of operators
workers/     the cluster as this router sees it, and the calls to its workers
telemetry/   stats, timings, metrics and spans of requests
"""
