"""The embedded engine in virtual time: its core with tiers, loans and kept memory, through deaths of its process.

core: the product's own parts, around a model that is a function of the ids, with threads that the seed runs
laws: what must hold
world: requests, readers and deaths
"""
