"""The journal of running decodes, in memory that outlives the engine's process: who owns which blocks, and all ids.

slots.py      one decode's place in it: what is written, in which order
journal.py    all slots: opened for new decodes, and read again by the next process
"""
