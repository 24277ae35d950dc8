"""One request inside vLLM.

sampling.py       our sampling parameters in vLLM's words
builder.py        checks requests, and builds the arguments of a call
plan.py           what vLLM computes for a request, and which of its first tokens the client has already
guided.py         grammars in vLLM's words, checked before
generation.py     the output of one request, followed to its end
endings.py        why a request ended, in our words
stream.py         an answer that is being generated, for its reader
inflight.py       all requests: submitted, aborted, counted
"""
