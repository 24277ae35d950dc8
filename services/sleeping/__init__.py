"""Models that share memory: of the workers of a group, those that are needed have theirs, and the others sleep.

config.py     the key `sleep` of a worker
group.py      who has memory: a record a worker, in a folder, and the rules by which it changes hands
sleeper.py    one worker's sleep: requests wait until it has its memory, which it gives back when another needs it
"""
