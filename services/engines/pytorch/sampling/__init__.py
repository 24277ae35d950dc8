"""Choosing the next tokens from logits.

sampling.py       penalties, draws and log probabilities of a batch; random numbers from (seed, position, token id)
drawing.py        draws on the device, without waiting for it
truncation.py     top-k, top-p and min-p
prompt_logprobs.py  log probabilities of a prompt's own tokens
"""
