"""`make eval`: how lm-eval's files are read, and when two outcomes are the same."""

import json
from pathlib import Path

import pytest

from models.demo.eval.harness import Harness, HarnessFailed, Outcome, read_outcome
from models.demo.eval.run import DIRECT, Evaluated, differences, is_same, table

RIGHT = Outcome("demo_answers", 1.0, 0.0, ("a",) * 200)
LIKELY = Outcome("demo_choices", 1.0, 0.0, ((-1.0, -2.0), (-3.0, -4.0)))


def written(folder: Path) -> Path:
    """The lines of lm-eval, in the order in which answers came."""
    folder.mkdir()
    answers = {"exact_match,none": 0.5, "exact_match_stderr,none": 0.25}
    results = {"demo_answers": answers, "demo_choices": {"acc,none": 1.0, "acc_stderr,none": 0.0}}
    (folder / "results_2026.json").write_text(json.dumps({"results": results}))
    rows = [{"doc_id": 1, "filtered_resps": ["b"]}, {"doc_id": 0, "filtered_resps": ["a"]}]
    (folder / "samples_demo_answers_2026.jsonl").write_text("\n".join(map(json.dumps, rows)))
    row = {"doc_id": 0, "filtered_resps": [["-1.5", "True"], ["-2.5", "False"]]}
    (folder / "samples_demo_choices_2026.jsonl").write_text(json.dumps(row))
    return folder


def test_the_answers_are_read_in_the_order_of_the_questions(tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    assert read_outcome(tmp_path, "demo_answers") == Outcome("demo_answers", 0.5, 0.25, ("a", "b"))
    assert read_outcome(folder, "demo_choices") == Outcome("demo_choices", 1.0, 0.0, ((-1.5, -2.5),))


def test_outcomes_are_the_same_up_to_rounding() -> None:
    one_other = Outcome("demo_answers", 0.995, 0.005, ("b", *("a",) * 199))
    many_others = Outcome("demo_answers", 0.9, 0.02, ("b",) * 20 + ("a",) * 180)
    assert [differences(each, RIGHT)[0] for each in (RIGHT, one_other, many_others)] == [0, 1, 20]
    assert [is_same(each, RIGHT) for each in (RIGHT, one_other, many_others)] == [True, True, False]
    near = Outcome("demo_choices", 1.0, 0.0, ((-1.0001, -2.0), (-3.0, -4.0)))
    far = Outcome("demo_choices", 1.0, 0.0, ((-1.5, -2.0), (-3.0, -4.0)))
    assert [is_same(each, LIKELY) for each in (near, far)] == [True, False]


def test_the_table_says_which_way_is_not_the_same() -> None:
    wrong = Outcome("demo_guided", 0.0, 0.0, ("b",) * 200)
    text, is_all_same = table([Evaluated(DIRECT, RIGHT), Evaluated("guided", wrong)])
    assert not is_all_same
    assert "| guided | demo_guided | 200 | 0.0000 | 0.0000 | 200 | 0.0e+00 | **no** |" in text
    assert table([Evaluated(DIRECT, RIGHT), Evaluated("aggregated", RIGHT, "3 workers killed")])[1]


def test_an_error_of_the_harness_is_one_of_the_evaluation(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such model >&2; exit 3\n")
    python.chmod(0o700)
    with pytest.raises(HarnessFailed, match=r"ended with 3:\nno such model"):
        Harness(python, 1, tmp_path).run("x", "hf", {}, ["demo_answers"])
