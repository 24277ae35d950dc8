"""One request inside vLLM.

sampling.py       our sampling parameters in vLLM's words; grammars, checked before; the prompt that it computes
media.py          prompts with images, by the embeddings of Baton's encoder
builder.py        checks requests, and builds the arguments of a call
generation.py     the output of one request, followed to its end
stream.py         vLLM's reasons to end a request, and its first token, in our words
inflight.py       all requests: submitted, aborted, counted
"""
