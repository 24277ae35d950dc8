"""Transports: how blocks move from an owner's pool to a reader's.

base.py           the Protocol of a transport
registry.py       the transports by name
cuda_ipc.py       between GPUs of one host: the reader maps the pool, a kernel copies
descriptors.py    hands the descriptor of memory to another process
shm.py            between processes of one host: the reader maps the pool
tcp.py            over sockets: the reader
tcp_server.py     over sockets: the owner
frames.py         what both sides of tcp send and receive
secure.py         TLS around tcp
nixl.py           RDMA: both sides
nixl_reading.py   RDMA: one pool that is read
nixl_agent.py     RDMA: the bindings of NIXL
"""
