"""The engine of diffusion pipelines, on the package diffusers.

config.py     its options
pipeline.py   a checkpoint's pipeline: its class, what it can do, one batch of pictures or clips, and their files
tea_cache.py  leaves out the work of steps that change little
split.py      a rank's part of the networks
ranks.py      the ranks that draw one picture together, as one of them sees them
leader.py     rank 0 of them, and what the others run
engine.py     the engine; the thread: batches of equal shapes, steps, cancellation, measured times
replicas.py   several such engines, on several GPUs
"""
