"""Media in prompts, in the order of a request.

prompt.py         MultimodalProcessor: loads media, and makes prompts with placeholders for it
encode.py         Embedder: encodes media on workers
cache.py          EmbeddingCache: content-addressed, with one call for all that want the same embedding
leases.py         a lease on an embedding in an encode worker's memory; renews those leases
"""
