"""Tensor parallelism: one process a rank, each with a part of every layer and the KV of its own heads.

shards.py      a rank's part of the weights
pool_part.py   a rank's heads in a pool that all share
ranks.py       the operations between ranks: sums, broadcasts, and the columns of logits
messages.py    what rank 0 tells the others
leader.py      rank 0's side: starts the others, tells them each step, notices their end
follower.py    the process of a rank above 0
"""
