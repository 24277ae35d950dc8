"""Bundles an inference engine for a machine with a GPU and without network, in parts of a given size. See docs/gpu.md.

    python -m tools.gpu_bundle RECIPE VERSION OUTPUT --present PRESENT --torch-wheel WHEEL

`recipe` names the packages, `wheels` chooses and downloads what the target lacks, `cuda` leaves out machine code of
other GPUs, `symbols` compares what extension modules need with what torch has, `parts` writes the parts, and `unpack`,
a program of its own, reads them on the target.
"""
