"""Block pools outside of engines, and the order in which requests get free blocks.

allocation.py     which request gets free blocks next
shared_pool.py    a pool that other processes can map; blocks in private memory
device_memory.py  pools in the memory of a GPU, as transports see them
"""
