"""The plan of a local cluster: from options to processes."""

import sys
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from cli.arguments import parse
from cli.commands.up import cluster_options
from cli.local.plan import ROOT, ClusterOptions, gpu_warning, has_vision, model_folder, plan
from router.config import RouterConfig
from runtime.config import load


def test_every_process_has_a_loopback_address_of_its_own(tmp_path: Path) -> None:
    cluster = plan(ClusterOptions(prefill=2, decode=3, engine="simulated"), tmp_path)
    addresses = [each.address for each in cluster.processes]
    assert [each.name for each in cluster.processes] == [
        *("etcd", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "router", "traces")
    ]
    assert len(set(addresses)) == 8
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_workers_and_the_router_send_their_spans_to_the_viewer(tmp_path: Path) -> None:
    cluster = plan(ClusterOptions(engine="simulated"), tmp_path)
    (otlp,) = [word.removeprefix("--otlp=") for word in cluster.traces.command if word.startswith("--otlp=")]
    assert all(f"tracing.endpoint={otlp}" in each.command for each in cluster.servers)


def test_every_process_of_ours_serves_its_metrics_at_an_address_of_its_own(tmp_path: Path) -> None:
    cluster = plan(ClusterOptions(prefill=2, decode=2, routers=2, engine="simulated"), tmp_path)
    assert all(f"metrics_listen={each.metrics}" in each.command for each in cluster.servers)
    addresses = [*(each.address for each in cluster.processes), *(each.metrics for each in cluster.servers)]
    assert len(set(addresses)) == len(cluster.processes) + len(cluster.servers)


def test_encode_workers_have_their_own_configuration(tmp_path: Path) -> None:
    cluster = plan(ClusterOptions(encode=2, engine="simulated"), tmp_path)
    encoders = [each for each in cluster.servers if each.role == "encode"]
    assert [each.name for each in encoders] == ["encode-0", "encode-1"]
    assert all(any(word.endswith("encode.yaml") for word in each.command) for each in encoders)


def test_a_model_sees_if_its_configuration_has_a_vision_tower(tmp_path: Path) -> None:
    assert has_vision(ROOT / "models" / "demo")
    assert not has_vision(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not has_vision(tmp_path)


def test_workers_share_the_cores(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    cluster = plan(ClusterOptions(prefill=500, decode=500, model=str(tmp_path)), tmp_path)
    assert "engine.threads=1" in cluster.servers[0].command


def test_workers_with_a_block_pool_share_the_memory_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (tmp_path / "config.json").write_text("{}")
    cluster = plan(ClusterOptions(encode=1, prefill=1, decode=3, model=str(tmp_path)), tmp_path)
    shares = {part for server in cluster.servers for part in server.command if "gpu_memory_share" in part}
    assert shares == {"engine.gpu_memory_share=0.225"}


def test_a_folder_without_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        plan(ClusterOptions(model=str(tmp_path)), tmp_path)


def test_on_two_gpus_prefill_and_decode_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    (tmp_path / "config.json").write_text("{}")
    cluster = plan(ClusterOptions(encode=1, prefill=1, decode=1, model=str(tmp_path)), tmp_path)
    assert {server.name: server.gpu for server in cluster.servers} == {
        "encode-0": "2",
        "prefill-0": "2",
        "decode-0": "5",
        "router": "",
    }
    assert "engine.gpu_memory_share=0.900" in cluster.servers[1].command


def test_two_gpus_are_shared_by_four_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (tmp_path / "config.json").write_text("{}")
    cluster = plan(ClusterOptions(prefill=2, decode=2, model=str(tmp_path)), tmp_path)
    workers = [server for server in cluster.servers if server.role != "router"]
    assert [worker.gpu for worker in workers] == ["0", "1", "0", "1"]
    assert all("engine.gpu_memory_share=0.500" in worker.command for worker in workers)


def test_a_router_without_openais_api_can_read_its_configuration(tmp_path: Path) -> None:
    cluster = plan(ClusterOptions(engine="simulated", openai_port=0), tmp_path)
    [router] = [server for server in cluster.servers if server.role == "router"]
    config, *overrides = router.command[3:]
    assert load(RouterConfig, config, overrides).value.openai.listen == ""


def test_without_gpus_nothing_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "config.json").write_text("{}")
    cluster = plan(ClusterOptions(model=str(tmp_path)), tmp_path)
    assert {server.gpu for server in cluster.servers} == {""}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--mode agg", (0, 0, 1)),
        ("--mode disagg", (0, 1, 1)),
        ("--mode epd", (1, 1, 1)),
        ("--mode disagg --prefill 3", (0, 3, 1)),
        ("--mode agg --encode 2 --decode 4", (2, 0, 4)),
        ("--engine simulated", (0, 1, 1)),
        (f"--model {ROOT}/models/demo", (1, 1, 1)),
    ],
)
def test_a_mode_is_a_choice_of_workers_and_a_number_is_stronger(words: str, expected: tuple[int, int, int]) -> None:
    options = cluster_options(parse(["up", *words.split()]))
    assert (options.encode, options.prefill, options.decode) == expected


def test_another_mode_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["up", "--mode", "fast"])
    assert "'agg', 'disagg', 'epd'" in capsys.readouterr().err


def test_workers_on_vllm_run_in_its_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    (tmp_path / "deploy" / "config").mkdir(parents=True)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("cli.local.plan.ROOT", tmp_path)
    cluster = plan(ClusterOptions(engine="vllm", model=str(tmp_path)), tmp_path)
    places = {each.role: each.command[0] for each in cluster.servers}
    assert places["prefill"] == places["decode"] == str(python) != places["router"]
    settings = "whole_requests: false, guided_decoding: false, cpu_kv_cache_gib: 1, args: {dtype: float32}"
    section = f"engine={{kind: vllm, model: {tmp_path}, {settings}}}"
    assert all(section in each.command for each in cluster.servers if each.role != "router")


def test_vllm_serves_the_demonstration_model_with_encode_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.local.plan._python_of_workers", lambda options: "python")
    cluster = plan(ClusterOptions(engine="vllm", encode=1), tmp_path)
    workers = [each for each in cluster.servers if each.role != "router"]
    assert {each.role for each in workers} == {"encode", "prefill", "decode"}
    assert all(f"kind: vllm, model: {model_folder('')}," in " ".join(each.command) for each in workers)


def test_a_decode_worker_on_vllm_without_prefill_workers_runs_whole_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("cli.local.plan._python_of_workers", lambda options: "python")
    cluster = plan(ClusterOptions(engine="vllm", prefill=0, model=str(tmp_path)), tmp_path)
    assert any("whole_requests: true" in word for word in cluster.servers[0].command)


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint, where the workers on vLLM run in the environment of this test, as its build for GPUs does."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("cli.local.plan._python_of_workers", lambda options: sys.executable)
    monkeypatch.setattr("cli.local.plan._python_of_vllm", lambda: tmp_path / "no .venv-vllm")
    return str(tmp_path)


def test_each_worker_on_vllm_has_its_own_gpu(vllm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-a,5")
    cluster = plan(ClusterOptions(engine="vllm", prefill=1, decode=2, model=vllm), tmp_path)
    assert {server.name: server.gpu for server in cluster.servers} == {
        "prefill-0": "3",
        "decode-0": "GPU-a",
        "decode-1": "5",
        "router": "",
    }
    assert not any("gpu_memory_utilization" in word for server in cluster.servers for word in server.command)


def test_workers_on_vllm_are_started_one_after_another(vllm: str, tmp_path: Path) -> None:
    options = ClusterOptions(engine="vllm", prefill=1, decode=2, model=vllm, share_gpus=True)
    assert [server.starts_after_seconds for server in plan(options, tmp_path).servers] == [0.0, 2.0, 4.0, 0.0]
    simulated = plan(ClusterOptions(engine="simulated", decode=8), tmp_path)
    assert {server.starts_after_seconds for server in simulated.servers} == {0.0}


def test_more_workers_on_vllm_than_gpus_are_refused_unless_they_are_meant_to_share(
    vllm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    options = ClusterOptions(engine="vllm", prefill=1, decode=2, model=vllm)
    with pytest.raises(ConfigError, match=r"3 workers and 2 visible GPUs: .*--share-gpus"):
        plan(options, tmp_path)
    cluster = plan(options.model_copy(update={"share_gpus": True}), tmp_path)
    workers = [server for server in cluster.servers if server.role != "router"]
    assert [worker.gpu for worker in workers] == ["0", "1", "0"]
    assert all(any("gpu_memory_utilization: 0.450" in word for word in worker.command) for worker in workers)


@pytest.mark.parametrize(
    ("gpus", "options", "said"),
    [
        ("0", {"prefill": 1, "decode": 1}, "2 workers and 1 visible GPU: workers share GPUs and their memory"),
        ("0,1", {"encode": 1, "prefill": 1, "decode": 1}, "3 workers and 2 visible GPUs"),
        ("0,1", {"prefill": 1, "decode": 1}, ""),
        ("", {"prefill": 4, "decode": 4}, ""),
        ("0", {"prefill": 4, "decode": 4, "share_gpus": True}, ""),
        ("0", {"prefill": 4, "decode": 4, "engine": "simulated"}, ""),
    ],
)
def test_sharing_gpus_without_being_asked_to_is_said(
    gpus: str, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    warning = gpu_warning(ClusterOptions(**options))
    assert warning.startswith(said)
    assert bool(warning) == bool(said)


def test_an_engine_that_it_cannot_start_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["up", "--engine", "trtllm"])
    assert "load MPI, and are not started by `baton up`: start `python -m services`" in capsys.readouterr().err
