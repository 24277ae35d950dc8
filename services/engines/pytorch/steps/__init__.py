"""The steps of the engine: which sequences each one computes, and what follows from its outcome.

pipeline.py       the steps themselves, one of which may be in flight
scheduler.py      which sequences take part in the next step, which wait, and which are preempted
tier_loads.py     sequences that wait for blocks of lower tiers; blocks that are reserved for a pull
loans.py          blocks that are lent to other workers
outcomes.py       tokens that are appended and sent, blocks that are cached, sequences that end or are held
"""
