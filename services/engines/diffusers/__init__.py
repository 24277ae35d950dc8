"""The engine of diffusion pipelines, on the package diffusers.

config.py    its options
pipeline.py  a checkpoint's pipeline: its class, what it can do, and one batch of pictures
engine.py    the engine; the thread: batches of equal shapes, steps, cancellation, measured times
"""
