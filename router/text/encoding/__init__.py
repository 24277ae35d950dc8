"""Token ids of texts, equal to those of the `tokenizers` library, and sooner for the tokenizers of most models.

encoder.py        Encoder: the quick way where it is known to be equal, else the library
pieces.py         finds added tokens in a text; the ids of the rest by a table of bytes, or by remembered words
word_patterns.py  how GPT-2, Llama 3, Qwen, GPT-4o and Mistral split a text into words
"""
