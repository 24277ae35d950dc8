"""One request inside vLLM.

sampling.py       our sampling parameters in vLLM's words; grammars in vLLM's words, checked before
builder.py        checks requests, and builds the arguments of a call
plan.py           what vLLM computes for a request, and which of its first tokens the client has already
generation.py     the output of one request, followed to its end
stream.py         vLLM's reasons to end a request, and its first token, in our words
inflight.py       all requests: submitted, aborted, counted
"""
