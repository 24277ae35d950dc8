"""The KV cache: a pool of blocks.

blocks.py         which blocks are in use, free, or cached for their prefix; the hash chain of a growing sequence
events.py         events of the prefix cache, and their publication
retention.py      which of the cached ones are evicted first; which of them only an ended session had
kept_cache.py     the part that outlives the process: seals in kept memory
memory.py         the pool's memory, which other processes can map
digester.py       digests of blocks, computed on their device
pool_size.py      the layout and the number of blocks
memory_plan.py    how much GPU memory the pool may take
held_kv.py        held prefills and reservations
tiers/            host memory and disk, for blocks that the pool evicts
cuda_ipc.py       CUDA memory handles, and the copy from another process's pool
"""
