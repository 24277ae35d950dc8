"""Choosing the next tokens from logits.

sampling.py       penalties, draws and log probabilities of a batch
drawing.py        draws on the device, without waiting for it
truncation.py     top-k, top-p and min-p; random numbers from (seed, position, token id)
prompt_logprobs.py  log probabilities of a prompt's own tokens
prompt_logprobs.py  log probabilities of a prompt's own tokens
"""
