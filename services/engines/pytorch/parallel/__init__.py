"""Tensor parallelism: one process a rank, each with a part of every layer and the KV of its own heads.

shards.py          a rank's part of the weights
ranks.py           the operations between ranks: sums, broadcasts, and the columns of logits
joining.py         how the ranks meet: by a file of their host, or by rank 0's store
peer_ranks.py      small ones of these between GPUs of one host, by kernels that write into each other's memory
peer_memory.py     that memory: its layout, and how the ranks map it
messages.py        what rank 0 tells the others
followers.py       what rank 0 needs of the others, wherever they run, and what it refuses
processes.py       the processes of ranks on rank 0's host: their start, messages and end
local_follower.py  a rank above 0: loads its part, joins, computes each step; its process on rank 0's
                   host, which rank 0 starts and tells each step
multi_node/        ranks that are started for themselves, on any host, and join rank 0 over TCP
"""
