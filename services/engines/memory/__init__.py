"""Block pools outside of engines, and the order in which requests get free blocks.

allocation.py     which request gets free blocks next
shared_pool.py    a pool that other processes can map; blocks in private memory
tensor_file.py    tensors in memory that other processes can map
device_memory.py  pools in the memory of a GPU, as transports see them
device_file.py    memory of a GPU that other processes can map by a descriptor, and that outlives its process
cuda_driver.py    CUDA's driver, called directly
"""
