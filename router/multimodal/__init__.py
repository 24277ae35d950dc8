"""Media in prompts, in the order of a request.

processor.py      MultimodalProcessor: loads media, and makes prompts with them
prompt.py         MultimodalPrompt: placeholders, and the prompt with and without embeddings
encode.py         Embedder: encodes media on workers
cache.py          EmbeddingCache: content-addressed, with one call for all that want the same embedding
leases.py         a lease on an embedding in an encode worker's memory
lease_renewer.py  renews those leases
"""
