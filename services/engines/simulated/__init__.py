"""The simulated engine: deterministic ids, configured step times, real blocks. For load tests and fault tests.

engine.py         the Engine
config.py         its configuration
ranks.py          the data-parallel ranks, each with a scheduler and blocks
scheduler.py      queue, batch and steps
timing.py         what a step takes: configured, or from a measured profile
sequence.py       one request: its ids, its blocks, its times
tokens.py         the ids that it generates; its model facts
preferences.py    what bad words, biases and penalties make of them
blocks.py         which blocks are free, used, or cached for their prefix, and the bytes in them
kv.py             held KV and reservations
diffuser.py       the Diffuser, whose pictures are noise
encoder.py        the Encoder, whose embeddings follow from the image's bytes, and the TextEmbedder
"""
