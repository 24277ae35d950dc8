"""Speeds on two GPUs of one host: handoffs over NVLink, tensor parallelism, disaggregated beside aggregated serving.

    python benchmarks/gpu_two.py [--only machine,transfer,...] [--seconds 560] [--output FOLDER] [--tiny]

Prints Markdown, for benchmarks/results/gpu-two.md. Each part is a process of its own with a time limit, so that one
that fails does not stop the others; its log goes to the folder. `--tiny` tries every part without GPUs.
"""

from benchmarks.parts import Part, run_parts

_FOLDER = "benchmarks.two_gpus"

PARTS = {
    "machine": Part("The machine", (f"{_FOLDER}.machine",), 75, writes_files=True),
    "transfer": Part("cuda_ipc, GPU 0 to GPU 1", (f"{_FOLDER}.transfer",), 110),
    "beside_decode": Part("Decode while KV is pulled", (f"{_FOLDER}.beside_decode",), 110),
    "tp_ids": Part("Tensor parallelism: the same ids", (f"{_FOLDER}.tensor_parallel", "ids"), 130),
    "tp_one": Part("Decode step on one GPU", (f"{_FOLDER}.tensor_parallel", "step", "--size", "1"), 90),
    "tp_two": Part("Decode step on two GPUs", (f"{_FOLDER}.tensor_parallel", "step", "--size", "2"), 120),
    "first_token": Part("The first tokens of long prompts", (f"{_FOLDER}.first_token",), 200),
    "decode_through_grpc": Part("Decode through gRPC", (f"{_FOLDER}.decode_through_grpc",), 110),
    "tp_two_nccl": Part("The same by NCCL alone", (f"{_FOLDER}.tensor_parallel", "step", "--size", "2", "--nccl"), 120),
    "exchange": Part("An exchange between the ranks", (f"{_FOLDER}.exchange",), 60),
    "serving": Part("Disaggregated beside aggregated", (f"{_FOLDER}.serving",), 260, writes_files=True),
    "faults": Part("Faults", (f"{_FOLDER}.faults",), 100),
    "nixl": Part("NIXL beside it", (f"{_FOLDER}.transfer", "--nixl"), 110),
}

if __name__ == "__main__":
    run_parts("gpu-two", PARTS, __doc__)
