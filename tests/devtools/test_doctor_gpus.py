"""Findings of `baton doctor` about GPUs: of reports in PyTorch's own form, and of this machine."""

import json

import pytest
import torch

from devtools.doctor.finding import Severity
from devtools.doctor.host import ask_torch, check_gpus, judge, parse

H100 = {"name": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "free": 84 * 10**9, "total": 85 * 10**9}
T4 = {"name": "Tesla T4", "capability": [7, 5], "free": 10**9, "total": 16 * 10**9}


def report(*gpus: dict[str, object], cuda: str = "13.0", triton: bool = True) -> str:
    return json.dumps({"torch": "2.11", "cuda": cuda, "triton": triton, "gpus": gpus})


CASES = [
    (report(H100), ["ok"], "78.2 of 79.2 GiB are free"),
    (report(cuda=""), ["warning"], "built without CUDA"),
    (report(), ["broken"], "finds none of the 1 GPUs"),
    (report(H100, triton=False), ["warning", "ok"], "no cuda_ipc"),
    (report(T4), ["warning", "warning"], "compute capability 7.5"),
]


@pytest.mark.parametrize(("said", "severities", "text"), CASES)
def test_a_report_of_pytorch_becomes_findings_with_remedies(said: str, severities: list[str], text: str) -> None:
    found = list(judge(parse(f"a warning of some library\n{said}\n"), visible=1))
    assert [finding.severity.value for finding in found] == severities
    assert any(text in finding.found for finding in found)
    assert all(finding.remedy for finding in found if finding.severity is not Severity.WELL)


def test_the_report_of_this_machine_is_what_pytorch_says() -> None:
    report = ask_torch()
    assert (report.torch, report.cuda) == (torch.__version__, torch.version.cuda or "")
    assert len(report.gpus) == torch.cuda.device_count()


def test_without_a_gpu_pytorch_is_not_asked() -> None:
    [finding] = check_gpus(())
    assert finding.severity is Severity.WELL
    assert "no NVIDIA GPU" in finding.found
