"""Evaluates the demonstration model by lm-eval: on the checkpoint itself, and through Baton's OpenAI API.

    python -m models.demo.eval.run [--samples 210] [--only aggregated disaggregated ...] [--output FILE]
        [--lm-eval .venv-eval/bin/python]

Greedy answers are to be the same as the checkpoint's own, and so are log likelihoods up to rounding. Where a float's
last bits decide between two tokens an answer may differ; then the score is to be within two standard errors. Exits with
1 if any of it is not so.
"""

import argparse
import math
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from models.demo.eval.clusters import Kills, LocalCluster, cluster
from models.demo.eval.harness import Harness, HarnessFailed, Outcome
from models.demo.text_only import write_text_model

_TEXTS: Final = ("demo_answers", "demo_choices")
# Of a choice: a few dozen tokens, each rounded to float32 in another order.
_LOGLIKELIHOOD_TOLERANCE: Final = 0.02
_MOST_OTHER_ANSWERS: Final = 0.01


@dataclass(frozen=True, slots=True)
class Way:
    """The options of a cluster, and the tasks that it is asked."""

    options: tuple[str, ...]
    tasks: tuple[str, ...] = _TEXTS
    is_killed: bool = False


WAYS: Final[Mapping[str, Way]] = {
    "aggregated": Way(("--mode", "agg")),
    "disaggregated": Way(("--mode", "disagg")),
    "after failovers": Way(("--mode", "disagg", "--prefill", "2", "--decode", "2"), is_killed=True),
    "guided": Way(("--mode", "disagg"), ("demo_guided",)),
}
DIRECT: Final = "checkpoint"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One task by one way, and what came of it beside the checkpoint's own outcome."""

    way: str
    outcome: Outcome
    note: str = ""


class Evaluation:
    """All ways, one after the other."""

    def __init__(self, harness: Harness, model: Path) -> None:
        self._harness = harness
        self._model = model

    def direct(self) -> Iterator[Evaluated]:
        """lm-eval on transformers, in float32, which Baton's engine computes in on CPUs."""
        arguments = {"pretrained": self._model, "dtype": "float32", "add_bos_token": True}
        for outcome in self._harness.run(DIRECT, "hf", arguments, _TEXTS):
            yield Evaluated(DIRECT, outcome)

    def through_baton(self, name: str, way: Way) -> Iterator[Evaluated]:
        """The tasks of a way. A request that fails fails the evaluation: lm-eval is not to repeat it."""
        with cluster(self._harness.folder / name.replace(" ", "-"), self._model, way.options) as running:
            kills = Kills(running)
            if way.is_killed:
                with kills.going_on():
                    outcomes = self._ask(name, running, way)
            else:
                outcomes = self._ask(name, running, way)
            note = f"{kills.done} workers killed" if way.is_killed else ""
        for outcome in outcomes:
            yield Evaluated(name, outcome, note)

    def _ask(self, name: str, running: LocalCluster, way: Way) -> list[Outcome]:
        arguments = {
            "model": self._model.name,
            "base_url": f"{running.openai}/completions",
            "tokenizer": self._model,
            "tokenizer_backend": "huggingface",
            "add_bos_token": True,
            "num_concurrent": 8,
            "max_retries": 1,
        }
        return self._harness.run(name, "local-completions", arguments, way.tasks)


def differences(outcome: Outcome, own: Outcome) -> tuple[int, float]:
    """The number of answers other than the checkpoint's, and the largest difference of log likelihoods."""
    pairs = [*zip(outcome.answers, own.answers, strict=True)]
    texts = sum(one != other for one, other in pairs if isinstance(one, str))
    numbers = [
        abs(a - b)
        for one, other in pairs
        if not isinstance(one, str) and not isinstance(other, str)
        for a, b in zip(one, other, strict=True)
    ]
    return texts, max(numbers, default=0.0)


def is_same(outcome: Outcome, own: Outcome) -> bool:
    """Within what is deterministic, and else within two standard errors."""
    others, difference = differences(outcome, own)
    noise = math.hypot(outcome.stderr, own.stderr)
    return (
        others <= _MOST_OTHER_ANSWERS * len(own.answers)
        and difference <= _LOGLIKELIHOOD_TOLERANCE
        and abs(outcome.score - own.score) <= 2 * noise
    )


def table(evaluated: list[Evaluated]) -> tuple[str, bool]:
    """The outcomes as Markdown, and whether all are the same as the checkpoint's."""
    own = {each.outcome.task: each.outcome for each in evaluated if each.way == DIRECT}
    lines = ["| way | task | questions | score | standard error | other answers | log likelihoods differ by | same |"]
    lines.append("|" + "---|" * 8)
    is_all_same = True
    for each in evaluated:
        outcome, base = each.outcome, own["demo_answers" if each.outcome.task == "demo_guided" else each.outcome.task]
        others, difference = differences(outcome, base)
        same = is_same(outcome, base)
        is_all_same &= same
        cells = [f"{each.way}{f', {each.note}' if each.note else ''}", outcome.task, str(len(outcome.answers))]
        cells += [f"{outcome.score:.4f}", f"{outcome.stderr:.4f}", str(others), f"{difference:.1e}"]
        lines.append(f"| {' | '.join([*cells, 'yes' if same else '**no**'])} |")
    return "\n".join(lines) + "\n", is_all_same


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=210, help="questions of each task")
    parser.add_argument("--only", nargs="+", choices=tuple(WAYS), default=list(WAYS), help="beside the checkpoint")
    parser.add_argument("--lm-eval", type=Path, default=Path(".venv-eval/bin/python"), help="its interpreter")
    parser.add_argument("--output", type=Path, help="a file for the table")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # So that clusters are taken down.
    with tempfile.TemporaryDirectory() as folder:
        harness = Harness(arguments.lm_eval.absolute(), arguments.samples, Path(folder))
        evaluation = Evaluation(harness, write_text_model(Path(folder) / "demo"))
        ways: list[Callable[[], Iterator[Evaluated]]] = [evaluation.direct]
        ways += [lambda name=name: evaluation.through_baton(name, WAYS[name]) for name in arguments.only]  # type: ignore[misc]
        try:
            evaluated = []
            for way in ways:
                for each in way():
                    evaluated.append(each)
                    print(f"{each.way}: {each.outcome.task}: {each.outcome.score:.4f}", file=sys.stderr, flush=True)
        except HarnessFailed as failure:
            sys.exit(str(failure))
    text, is_all_same = table(evaluated)
    print(text, end="")
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    sys.exit(0 if is_all_same else 1)


if __name__ == "__main__":
    main()
