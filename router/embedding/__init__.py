"""Requests for embeddings of texts.

pipeline.py   the life of a request: validate, tokenize, admit, embed; checks of a request, and its inputs as token ids
calls.py      its calls to workers with the role embed: parts, placement, retries
"""
