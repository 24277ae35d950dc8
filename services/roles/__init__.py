"""The roles of workers, a module each: servicer, logic and conversion, and the `open_service` that a RoleKind names.

* `encode.py`: media become embeddings.
* `prefill.py`: a prompt's KV, held under a lease.
* `decode.py`: an answer, from held KV or from its prompt.
* `embed.py`: texts become vectors.
* `diffuse.py`: pictures and clips.
"""
