"""Speculative decoding: several tokens of a sequence in one step, with the same ids as one by one.

prompt_lookup.py   guesses the next tokens from an earlier occurrence of the last ones
drafting.py        which sequences get drafts in a step, and how many; which of them it confirms
"""
