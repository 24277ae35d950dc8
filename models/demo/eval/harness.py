"""Runs lm-eval in its own environment, and reads its scores and the answer to each question."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TASKS = Path(__file__).resolve().parent
_ROOT = TASKS.parents[2]
_METRICS = {"demo_answers": "exact_match", "demo_guided": "exact_match", "demo_choices": "acc"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One task: its score with the standard error, and to each question the answer, or its choices' log likelihoods."""

    task: str
    score: float
    stderr: float
    answers: tuple[str | tuple[float, ...], ...]


class HarnessFailed(Exception):
    """lm-eval has ended with an error; the message has the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Harness:
    """lm-eval of an environment, and the number of questions."""

    python: Path
    samples: int
    folder: Path

    def run(self, name: str, model: str, arguments: Mapping[str, object], tasks: Sequence[str]) -> list[Outcome]:
        """The outcomes of some tasks on a model of lm-eval. Raises HarnessFailed."""
        output = self.folder / name
        command = [
            *(
                str(self.python),
                "-m",
                "lm_eval",
                "run",
                "--model",
                model,
                "--device",
                "cpu",
                "--include_path",
                str(TASKS),
            ),
            *("--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())),
            *("--tasks", ",".join(tasks), "--metadata", json.dumps({"samples": self.samples})),
            *("--output_path", str(output), "--log_samples"),
        ]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise HarnessFailed(f"{name}: lm-eval ended with {ran.returncode}:\n{(ran.stdout + ran.stderr)[-4000:]}")
        return [read_outcome(output, task) for task in tasks]


def read_outcome(output: Path, task: str) -> Outcome:
    """The outcome of a task, from the newest files that lm-eval has written below a folder."""
    results = json.loads(_newest(output, "results_*.json").read_text())["results"][task]
    metric = _METRICS[task]
    rows = [json.loads(line) for line in _newest(output, f"samples_{task}_*.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: int(row["doc_id"]))
    return Outcome(
        task, results[f"{metric},none"], float(results[f"{metric}_stderr,none"]), tuple(_answer(row) for row in rows)
    )


def _newest(output: Path, pattern: str) -> Path:
    return max(output.rglob(pattern), key=lambda path: path.stat().st_mtime)


def _answer(row: Mapping[str, Any]) -> str | tuple[float, ...]:
    """Of a generation its text, of choices their log likelihoods."""
    responses = row["filtered_resps"]
    return responses[0] if isinstance(responses[0], str) else tuple(float(each[0]) for each in responses)
