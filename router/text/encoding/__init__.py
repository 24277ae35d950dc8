"""Token ids of texts, equal to those of the `tokenizers` library, and sooner for the tokenizers of most models.

encoder.py        Encoder: the quick way where it is known to be equal, else the library
pieces.py         the ids of a text without added tokens: by a table of bytes, or by words that are remembered
word_patterns.py  how GPT-2, Llama 3, Qwen, GPT-4o and Mistral split a text into words
added_tokens.py   finds special and other added tokens in a text
bounded_cache.py  remembers what was used last, in bounded memory
"""
