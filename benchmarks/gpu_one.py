"""The figures of one GPU: KV tiers, answers that move between two workers on it, prefill, a profile, images.

    PYTHONPATH=.:tests python -m benchmarks.gpu_one [--only tiers,drain,...] [--seconds 560] [--output FOLDER] [--tiny]

Prints what benchmarks/results/kv_tiers.md, moves.md and gpu.md have of it. Each part is a process of its own with a
time limit, so that one that fails does not stop the others; its log goes to the folder. `--tiny` tries every part
without a GPU.
"""

from benchmarks.parts import Part, run_parts

_IMAGES = ("benchmarks.images", "--rounds", "3", "--requests", "60", "--concurrency", "8")

PARTS = {
    "tiers": Part("KV tiers", ("benchmarks.tiers.gpu",), 200),
    "drain": Part("A drained worker, 8B shape in bfloat16", ("benchmarks.one_gpu.drain",), 110),
    "drain_ids": Part("A drained worker, small shape in float32", ("benchmarks.one_gpu.drain", "--small"), 70),
    "prefill": Part("Prefill", ("benchmarks.gpu", "--only", "prefill"), 80),
    "profile": Part("Profile", ("benchmarks.one_gpu.profile",), 180, writes_files=True),
    "images": Part(
        "Images",
        (*_IMAGES, "--device", "cuda"),
        150,
        tiny=("--device", "cpu", "--rounds", "1", "--requests", "4", "--sizes", "32", "--numbers", "1"),
    ),
}

if __name__ == "__main__":
    run_parts("gpu-one", PARTS, __doc__)
