"""Workers with keepers: what outlives a process of theirs, and how the next one goes on with it.

engine: the simulated engine with kept memory
keeper: a keeper and its processes, by the product's own code, and what stands for the kernel
keepers: all keepers of a world, and their faults
plans: which seeds have them
"""
