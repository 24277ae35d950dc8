"""Media of prompts, and their embeddings.

media_spans.py      the media of a prompt, read and checked
media_resolver.py   puts embeddings into prompts, pulling what is leased
embedding_pull.py   the reader's side of a leased embedding; the owner's pool of large embeddings
"""
