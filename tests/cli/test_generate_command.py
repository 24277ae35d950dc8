"""`baton generate` against a real router."""

import asyncio
import json
import signal
import sys
from pathlib import Path

from support.clients.baton_command import Baton, SmallCluster
from support.eventually import eventually
from support.servers.otlp import viewing

from devtools.trace_viewer import reading
from devtools.trace_viewer.reading import read
from runtime.aio import timeout


async def test_the_answer_is_printed_with_a_line_break_at_its_end(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("generate", "hello", "--max-tokens", "6", "--seed", "1", "--address", cluster.address)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.endswith("\n")
    assert len(outcome.out) == 7  # one character a token


async def test_the_same_seed_gives_the_same_answer(baton: Baton, cluster: SmallCluster) -> None:
    words = ["generate", "hello", "--max-tokens", "6", "--seed", "7", "--address", cluster.address]
    first, second = await asyncio.gather(baton(*words), baton(*words))
    assert first.out == second.out


async def test_json_prints_each_event_as_a_line(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("generate", "hello", "--max-tokens", "3", "--json", "--address", cluster.address)
    events = [json.loads(line) for line in outcome.lines]
    assert "started" in events[0]
    assert events[-1]["finished"]["usage"] == {"prompt_tokens": 5, "completion_tokens": 3}
    assert sum(len(event["token"]["token_ids"]) for event in events if "token" in event) == 3


async def test_timing_shows_the_timings_on_standard_error(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("generate", "hello", "--max-tokens", "3", "--timing", "--address", cluster.address)
    assert len(outcome.lines) == 1
    stages = [line.split("  ")[0] for line in outcome.err.splitlines()]
    assert {"prefill compute", "handoff transfer", "decode", "total"} <= set(stages)


async def test_timing_shows_how_far_a_request_came_that_failed(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("generate", "-", "--timing", "--address", cluster.address, stdin=b"x" * 100_000)
    assert outcome.code == 2
    stages = [line.split("  ")[0] for line in outcome.err.splitlines()]
    assert {"admission", "unattributed", "total"} <= set(stages)
    assert stages[-1].startswith("error: INVALID_REQUEST")


async def test_a_prompt_of_token_ids_is_sent_as_ids(baton: Baton, cluster: SmallCluster) -> None:
    words = ["--token-ids", "--max-tokens", "2", "--json", "--address", cluster.address]
    outcome = await baton("generate", "104, 101 108", *words)
    assert json.loads(outcome.lines[0])["started"]["prompt_tokens"] == 3


async def test_how_many_tokens_come_together_reaches_the_router(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("generate", "hello", "--min-tokens-per-message", "1025", "--address", cluster.address)
    assert outcome.code != 0
    assert "response.min_tokens_per_message" in outcome.err


async def test_a_word_among_token_ids_is_named(baton: Baton) -> None:
    outcome = await baton("generate", "104 hello", "--token-ids")
    assert outcome.code == 2
    assert outcome.err == "error: INVALID_REQUEST: token_ids.ids[1]: 'hello' is not a token id\n"


async def test_a_dash_reads_the_prompt_from_standard_input(baton: Baton, cluster: SmallCluster) -> None:
    words = ["--json", "--max-tokens", "1", "--address", cluster.address]
    outcome = await baton("generate", "-", *words, stdin="grüße".encode())
    assert json.loads(outcome.lines[0])["started"]["prompt_tokens"] == 7  # bytes


async def test_the_answer_ends_before_a_stop_string(baton: Baton, cluster: SmallCluster) -> None:
    words = ["generate", "hello", "--max-tokens", "8", "--seed", "3", "--address", cluster.address]
    whole = (await baton(*words)).out.strip()
    stopped = await baton(*words, "--stop", whole[3:5], "--stop", "never")
    assert stopped.out.strip() == whole[: whole.index(whole[3:5])]


async def test_a_system_message_makes_the_prompt_longer(baton: Baton, cluster: SmallCluster) -> None:
    words = ["--json", "--max-tokens", "1", "--address", cluster.address]
    alone = await baton("generate", "hi", "--chat", *words)
    led = await baton("generate", "hi", "--system", "Be brief.", *words)
    tokens = [json.loads(outcome.lines[0])["started"]["prompt_tokens"] for outcome in (alone, led)]
    assert tokens[1] >= tokens[0] + len("Be brief.")


async def test_a_wrong_value_is_one_line_naming_the_field_and_exit_code_two(
    baton: Baton, cluster: SmallCluster
) -> None:
    outcome = await baton("generate", "hello", "--temperature", "-1", "--address", cluster.address)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: INVALID_REQUEST: sampling.temperature: ")
    assert outcome.err.count("\n") == 1


async def test_a_prompt_that_is_not_utf8_is_refused_before_it_is_sent(baton: Baton) -> None:
    outcome = await baton("generate", b"caf\xe9", "--address", "127.0.0.1:1")
    assert outcome.code == 2
    assert outcome.err == "error: INVALID_REQUEST: prompt: is not valid UTF-8 at character 3\n"


async def test_an_unknown_model_is_exit_code_two_and_lists_the_known(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("generate", "hello", "--model", "other", "--address", cluster.address)
    assert outcome.code == 2
    assert outcome.err.startswith("error: MODEL_NOT_FOUND: ")
    assert "small" in outcome.err


async def test_a_router_that_is_not_there_is_exit_code_one_and_says_what_to_do(baton: Baton) -> None:
    outcome = await baton("generate", "hello", "--address", "127.0.0.1:1")
    assert outcome.code == 1
    assert "no response from 127.0.0.1:1" in outcome.err
    assert outcome.err.count("\n") == 1


async def test_a_timeout_that_is_over_is_exit_code_one(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("generate", "hello", "--timeout", "0.3", "--address", cluster.address)
    assert outcome.code == 1
    assert "DEADLINE_EXCEEDED" in outcome.err


async def test_ctrl_c_frees_the_workers_blocks(cluster: SmallCluster, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli", "generate", "hello", "--address", cluster.address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with timeout(30):
        await process.stdout.read(1)
        assert cluster.blocks_used
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    await eventually(lambda: not cluster.blocks_used)
    assert (process.returncode, err) == (130, b"interrupted\n")


async def test_a_reader_that_has_had_enough_ends_the_command_quietly(cluster: SmallCluster) -> None:
    command = f"{sys.executable} -m cli generate hello --address {cluster.address} | head -c 3"
    process = await asyncio.create_subprocess_shell(
        command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with timeout(30):
        out, err = await process.communicate()
    assert (len(out), err) == (3, b"")


async def test_the_address_of_the_environment_is_used(
    baton: Baton, cluster: SmallCluster, environment: dict[str, str]
) -> None:
    environment["BATON_ADDRESS"] = cluster.address
    assert (await baton("generate", "hello", "--max-tokens", "1")).code == 0


async def test_the_address_of_the_local_cluster_is_used(baton: Baton, cluster: SmallCluster, tmp_path: Path) -> None:
    (tmp_path / ".baton").mkdir()
    (tmp_path / ".baton" / "address").write_text(f"{cluster.address}\n")
    assert (await baton("generate", "hello", "--max-tokens", "1")).code == 0


async def test_a_priority_out_of_range_is_refused_before_it_is_sent(baton: Baton) -> None:
    outcome = await baton("generate", "hello", "--priority", "11", "--address", "127.0.0.1:1")
    assert outcome.code == 2
    assert "--priority" in outcome.err.splitlines()[-1]


async def test_the_tenant_is_sent(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("generate", "hello", "--tenant", "x" * 129, "--address", cluster.address)
    assert outcome.code == 2
    assert outcome.err == "error: INVALID_REQUEST: x-baton-tenant: must be at most 128 printable ASCII characters\n"


async def test_a_tenant_that_no_header_can_carry_is_refused_before_it_is_sent(baton: Baton) -> None:
    outcome = await baton("generate", "hello", "--tenant", "Zoë", "--address", "127.0.0.1:1")
    assert outcome.code == 2
    assert outcome.err == "error: INVALID_REQUEST: x-baton-tenant: must be printable ASCII, as all gRPC metadata\n"


async def test_the_trace_of_a_request_begins_with_the_commands_own_span(
    baton: Baton, cluster: SmallCluster, environment: dict[str, str]
) -> None:
    async with viewing() as viewer:
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://{viewer.otlp_address}"
        outcome = await baton("generate", "hello", "--max-tokens", "2", "--address", cluster.address)
        (trace,) = viewer.store.newest_first()
    assert (outcome.code, outcome.err) == (0, "")
    (span,) = read(reading.trace(trace)).spans
    assert (span.service, span.name) == ("baton-cli", "baton.inference.v1.InferenceService/Generate")
    assert span.attributes["baton.request_id"]


async def test_a_receiver_of_traces_that_is_not_there_changes_nothing(
    baton: Baton, cluster: SmallCluster, environment: dict[str, str]
) -> None:
    environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:1"
    outcome = await baton("generate", "hello", "--max-tokens", "2", "--json", "--address", cluster.address)
    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(outcome.lines[-1])["finished"]


async def test_grammars_reach_the_router(baton: Baton, cluster: SmallCluster, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    for words in (["--json-schema", str(schema)], ["--regex", "a+"], ["--choice", "a", "--choice", "b"]):
        outcome = await baton("generate", "hello", *words, "--address", cluster.address)
        # The simulated engine says what it lacks.
        assert "does not support guided decoding" in outcome.err
    missing = await baton("generate", "hello", "--json-schema", str(tmp_path / "none"), "--address", cluster.address)
    assert (missing.code, "guided.json_schema" in missing.err) == (2, True)


async def test_a_kept_answer_is_printed_again_by_its_handle(baton: Baton, cluster: SmallCluster) -> None:
    words = ["--max-tokens", "6", "--seed", "1", "--address", cluster.address]
    first = await baton("generate", "hello", "--keep", "10", *words)
    [told] = first.err.splitlines()
    assert told.startswith("handle: b1.")
    resumed = ["generate", "--resume", told.removeprefix("handle: "), "--timing", "--address", cluster.address]
    again = await baton(*resumed)
    assert (again.code, again.out) == (0, first.out)
    assert "resumed, 1 in all" in again.err


async def test_a_prompt_and_a_handle_exclude_each_other(baton: Baton, cluster: SmallCluster) -> None:
    for words in (["generate"], ["generate", "hello", "--resume", "b1.x"]):
        outcome = await baton(*words, "--address", cluster.address)
        assert outcome.code == 2
        assert "PROMPT" in outcome.err
