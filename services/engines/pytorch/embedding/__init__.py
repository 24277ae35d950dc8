"""Vectors of texts.

embedder.py        the TextEmbedder: asynchronous calls into its thread
embedder_loop.py   the embedder's thread: takes all calls that wait, and runs their texts together
text_model.py      a checkpoint as a model that gives a state for each token
pooling.py         from the states of a text's tokens to one vector
checkpoint_rules.py  what a checkpoint's sentence-transformers files say of its vectors
"""
