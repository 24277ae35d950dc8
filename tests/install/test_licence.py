"""The licence, the metadata and the CI workflow."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github/workflows/ci.yaml"


def test_the_workflow_is_valid_and_does_what_ci_run_does() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(WORKFLOW)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    [job] = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step][-1] == ".ci/run"
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_the_licence_is_apache_2_0_in_full() -> None:
    text = (ROOT / "LICENSE").read_text()
    sections = re.findall(r"^   (\d)\. ", text, re.M)
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert sections == [str(number) for number in range(1, 10)]
    assert "END OF TERMS AND CONDITIONS" in text
