"""Checkpoints and language models.

loading.py        loads a checkpoint: the module that computes logits, and its facts
kept_weights.py   weights that outlive the process
support.py        the checkpoints that the engine supports
checkpoint.py     the files of a checkpoint folder, and their fingerprint
attention.py      attention over the block pool for transformers' models
fused_model.py    Llama-like models with few, large operations
"""
