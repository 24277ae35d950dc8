"""The operations of the fused model.

paged_ops.py         in plain PyTorch: the reference, and for CPUs
triton_ops.py        by Triton kernels; importable only where Triton is installed
triton_kernels.py    the Triton kernels
chunk_kernels.py     those of attention for chunks of prompts
digest_kernels.py    the Triton kernel that digests KV blocks
exchange_kernels.py  those by which the ranks of a split model exchange rows
"""
