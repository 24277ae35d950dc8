"""Tiers below the device pool: blocks that the pool evicts go to host memory, and from there to a disk.

directory.py   which block is in which tier and slot, which one leaves next, and when the disk is written
host.py        the tier in host memory, and the copies between it and the pool
disk.py        the tier in a file
jobs.py        blocks on their way, and how far they are; how fast loading and computing are, and which is sooner
mover.py       a thread that moves blocks in one direction
moves.py       demotions, spills and loads, each direction on a thread of its own
tiers.py       all of it, for the engine's thread
options.py     the key `engine.tiers`

A block is in one tier only. It is copied out in the background while its place in the pool is already given away: a
step that writes there waits for the copy, which is ten times quicker than computing. A load that fails, is late or is
damaged is a miss: the blocks are computed.
"""
