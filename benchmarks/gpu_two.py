"""What two GPUs of one host reach: handoffs over NVLink, tensor parallelism, disaggregated beside aggregated serving.

    python benchmarks/gpu_two.py [--only machine,transfer,...] [--seconds 560] [--output FOLDER] [--tiny]

Prints Markdown, for benchmarks/results/gpu-two.md. Each part is a process of its own with a time limit, so that one
that fails does not stop the others; its log goes to the folder. `--tiny` tries every part without GPUs.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOG_LINES = 25


@dataclass(frozen=True, slots=True)
class Part:
    """A part: its title, its module in benchmarks/two_gpus with arguments, and its limit in seconds."""

    title: str
    command: tuple[str, ...]
    seconds: float
    writes_files: bool = False


PARTS = {
    "machine": Part("The machine", ("machine",), 75, writes_files=True),
    "transfer": Part("cuda_ipc, GPU 0 to GPU 1", ("transfer",), 110),
    "beside_decode": Part("Decode while KV is pulled", ("beside_decode",), 110),
    "tp_ids": Part("Tensor parallelism: the same ids", ("tensor_parallel", "ids"), 130),
    "tp_one": Part("Decode step on one GPU", ("tensor_parallel", "step", "--size", "1"), 90),
    "tp_two": Part("Decode step on two GPUs", ("tensor_parallel", "step", "--size", "2"), 120),
    "first_token": Part("The first tokens of long prompts", ("first_token",), 200),
    "decode_through_grpc": Part("Decode through gRPC", ("decode_through_grpc",), 110),
    "tp_two_nccl": Part("The same by NCCL alone", ("tensor_parallel", "step", "--size", "2", "--nccl"), 120),
    "exchange": Part("An exchange between the ranks", ("exchange",), 60),
    "serving": Part("Disaggregated beside aggregated", ("serving",), 260, writes_files=True),
    "faults": Part("Faults", ("faults",), 100),
    "nixl": Part("NIXL beside it", ("transfer", "--nixl"), 110),
}


def run(name: str, part: Part, seconds: float, output: Path) -> None:
    """Runs a part with its limit, and prints what it printed."""
    print(f"\n## {part.title}\n", flush=True)
    command = [sys.executable, "-m", f"benchmarks.two_gpus.{part.command[0]}", *part.command[1:]]
    if part.writes_files:
        command += ["--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1"}
    began, log = time.monotonic(), output / f"{name}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors, start_new_session=True)
        try:
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"none: stopped after its limit of {seconds:.0f} s"
        finally:
            end(process)
    took = time.monotonic() - began
    if code == 0:
        print(f"\n(`{name}`, {took:.0f} s)", flush=True)
        return
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    print(
        f"\n**`{name}` did not end well**, exit code {code}, {took:.0f} s. Its log ends:\n\n```\n{tail}\n```",
        flush=True,
    )


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the part's processes, all of which are in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=560.0, help="for all parts together")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", "gpu-two-output")))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        os.environ["BATON_BENCHMARK_TINY"] = "1"
    options.output.mkdir(parents=True, exist_ok=True)
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"unknown parts {', '.join(unknown)}; there are {', '.join(PARTS)}")
    deadline = time.monotonic() + options.seconds
    print("# gpu-two\n", flush=True)
    for name in chosen:
        left = deadline - time.monotonic()
        if left < 15:
            print(f"\n## {PARTS[name].title}\n\nNot run: no time was left.", flush=True)
            continue
        if (options.output / "see-both").exists():
            os.environ["BATON_BENCHMARK_SEE_BOTH"] = "1"
        run(name, PARTS[name], min(PARTS[name].seconds * (4 if options.tiny else 1), left), options.output)


if __name__ == "__main__":
    main()
