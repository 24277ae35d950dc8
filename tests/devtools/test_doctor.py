"""`baton doctor` on sound and broken installations."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.clients.baton_command import Baton, SmallCluster

from baton.inference.v1 import cluster_service_pb2
from devtools.doctor.cluster import check_workers
from devtools.doctor.finding import Severity
from devtools.doctor.host import check_shared_memory

ROOT = Path(__file__).resolve().parents[2]
READY, UNHEALTHY = cluster_service_pb2.WORKER_STATE_READY, cluster_service_pb2.WORKER_STATE_UNHEALTHY


def worker(worker_id: str, role: str, layout: str = "a" * 64, state: int = READY) -> cluster_service_pb2.Worker:
    return cluster_service_pb2.Worker(
        worker_id=worker_id,
        roles=[role],
        model="demo",
        state=state,  # type: ignore[arg-type]
        layout_digest=layout,
        address="127.0.0.1:1",
    )


def problems(*workers: cluster_service_pb2.Worker) -> list[str]:
    return [finding.found for finding in check_workers(workers) if finding.severity is not Severity.WELL]


@pytest.fixture
def distribution(tmp_path: Path, environment: dict[str, str]) -> Path:
    """A folder that Python takes for installed packages, besides the real ones."""
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path / "packages"), str(ROOT)))
    (tmp_path / "packages").mkdir()
    return tmp_path / "packages"


def install(packages: Path, name: str, requires: str = "", module: str = "") -> None:
    """Puts version 1.0 of a distribution there, as pip would have."""
    folder = packages / f"{name}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}")
    (folder / "RECORD").write_text(f"{module}/__init__.py,,\n" if module else "")
    (folder / "top_level.txt").write_text(f"{module}\n")


async def test_a_sound_installation_and_its_cluster_have_nothing_broken(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("doctor", "--address", cluster.address)
    assert (outcome.code, outcome.lines[-1]) == (0, "nothing is broken")
    assert f"the router at {cluster.address} (--address) is healthy" in outcome.out


async def test_a_router_that_is_not_there_is_broken_if_it_was_named(baton: Baton) -> None:
    outcome = await baton("doctor", "--address", "127.0.0.1:1")
    assert outcome.code == 1
    assert "broken   nothing listens at 127.0.0.1:1 (from --address)" in outcome.out


async def test_a_version_that_baton_cannot_use_is_broken(baton: Baton, distribution: Path) -> None:
    install(distribution, "structlog")
    outcome = await baton("doctor")
    assert outcome.code == 1
    assert "broken   baton-serving needs structlog>=25, and 1.0 is installed" in outcome.out


async def test_a_requirement_of_a_requirement_that_is_missing_is_broken(baton: Baton, distribution: Path) -> None:
    install(distribution, "structlog", "Requires-Dist: never-heard-of\n")
    assert "broken   structlog needs never-heard-of, which is not installed" in (await baton("doctor")).out


async def test_a_clash_among_other_packages_is_a_warning(
    baton: Baton, cluster: SmallCluster, distribution: Path
) -> None:
    install(distribution, "demanding", "Requires-Dist: grpcio<1.0\n")
    outcome = await baton("doctor", "--address", cluster.address)  # by default it finds what else runs here
    assert outcome.code == 0
    assert "warning  demanding needs grpcio<1.0, and " in outcome.out


async def test_a_package_that_cannot_be_imported_is_broken_and_named(baton: Baton, distribution: Path) -> None:
    (distribution / "pydantic.py").write_text("raise ImportError('pydantic is in pieces')")
    outcome = await baton("doctor")
    assert (outcome.code, outcome.err) == (1, "")
    assert "broken   pydantic is in pieces; the checks that need it were skipped" in outcome.out


async def test_another_owner_of_our_names_is_broken(baton: Baton, distribution: Path) -> None:
    install(distribution, "intruder", module="router")
    outcome = await baton("doctor")
    assert outcome.code == 1
    assert "broken   the package intruder installed a module named 'router'" in outcome.out


def test_stubs_that_were_not_generated_are_broken_and_doctor_still_runs(tmp_path: Path) -> None:
    for name in ("cli", "devtools", "rpc", "baton", "protos"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*_pb2*", "__pycache__"))
    command = [sys.executable, "-m", "cli", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "stubs are missing" in done.stdout
    assert "-> make protos" in done.stdout


def test_layouts_that_differ_are_broken() -> None:
    found = problems(worker("p", "prefill", "a" * 64), worker("d", "decode", "b" * 64))
    assert found == [
        "workers of demo have different KV layouts and cannot hand over (aaaaaaaaaaaa: p; bbbbbbbbbbbb: d)"
    ]


@pytest.mark.parametrize("role", ["encode", "embed"])
def test_an_encode_or_embed_worker_has_no_kv_whose_layout_could_differ(role: str) -> None:
    assert problems(worker("e", role, "b" * 64), worker("p", "prefill"), worker("d", "decode")) == []


def test_a_worker_that_is_unhealthy_is_broken() -> None:
    found = problems(worker("p", "prefill"), worker("d", "decode", state=UNHEALTHY))
    assert found == ["d (decode) at 127.0.0.1:1 is unhealthy"]


def test_the_problem_that_the_router_sees_is_shown() -> None:
    bad_card, odd_layout = worker("p", "prefill", state=UNHEALTHY), worker("d", "decode")
    bad_card.problem = "its model card has no tokenizer"
    odd_layout.problem = "its KV layout fits no prefill worker"
    assert problems(bad_card, odd_layout) == [
        "p (prefill) at 127.0.0.1:1 is unhealthy: its model card has no tokenizer",
        "d (decode) at 127.0.0.1:1 is ready, but cannot take part in handoffs: its KV layout fits no prefill worker",
    ]


def test_a_model_without_a_decode_worker_is_broken() -> None:
    assert problems(worker("p", "prefill")) == ["demo has no decode worker, so no request can complete"]


def test_no_worker_at_all_is_broken() -> None:
    assert problems() == ["no worker is registered"]


def test_memory_of_another_process_can_be_mapped_here() -> None:
    assert [finding.severity for finding in check_shared_memory()] == [Severity.WELL]
