"""Guided decoding: no token is sampled that a request's grammar does not allow.

vocabulary.py     the model's tokens as grammars see them
compiler.py       a request's grammar, compiled beside the event loop and cached; the masks of a step
guidance.py       one request's place in its grammar
"""
