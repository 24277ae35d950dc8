"""Runners: compute a step of the model for a batch of sequences.

batch.py          the tensors of a step
runner.py         steps of transformers' modules
fused_runner.py   steps of the fused model, with CUDA graphs
host_copies.py    numbers of a step to the device, and its ids back
mixed_steps.py    sizes and arrays of captured steps of decodes and short chunks of prompts
layer_groups.py   the end of a long prompt beside decodes, a group of layers in each of several steps
step_tensors.py   the tensors of a fused step, copied to the device at once; rows of prompts' log probabilities
selection.py      chooses the runner for a model
"""
