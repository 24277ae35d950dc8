"""Vectors of texts.

embedder.py        the TextEmbedder: asynchronous calls, and the thread that runs all texts that wait together
text_model.py      a checkpoint as a model, by its sentence-transformers files: from tokens to one vector
"""
