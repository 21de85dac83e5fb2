"""Do the replica's small parts record what they are given: phases, memory, load?"""

from __future__ import annotations

import json
import logging

import pytest

from rayserve.errors import HostError, PlanError
from rayserve.inventory import read_plan
from rayserve.plan import NamedValue, Placement
from rayserve.serve_config import HAPROXY_SWITCH, live_plan
from rayserve.serving.guards import (
    check_environment,
    check_gang,
    check_keys,
    check_limits,
)
from rayserve.serving.ledger import (
    PHASE_FILE,
    MemoryReport,
    PhaseHandler,
    StartLedger,
    append,
    write_logging_config,
)
from rayserve.serving.load import WINDOW_S, EngineLoad
from tests.bad_specs import ROOT
from tests.errors_of import error_of


def record(message: str, *args: object) -> logging.LogRecord:
    """A message as vLLM's logger hands it to its handlers."""
    return logging.LogRecord("vllm", logging.INFO, "x.py", 1, message, args, None)


def test_engine_messages_become_phases(tmp_path, monkeypatch):
    """Weights and profile come from vLLM's own messages; the slowest rank counts."""
    file = tmp_path / "phases.jsonl"
    monkeypatch.setenv(PHASE_FILE, str(file))
    handler = PhaseHandler()
    handler.emit(record("Model loading took %s GiB memory and %.6f seconds", "56.77", 12.5))
    handler.emit(record("Model loading took %s GiB memory and %.6f seconds", "56.77", 14.5))
    handler.emit(record("init engine (profile, create kv cache, warmup model) took %.2f s", 3.0))
    handler.emit(record("something else took %.2f s", 99.0))
    ledger = StartLedger("abc")
    ledger.read_engine_phases(file)
    assert ledger.phases == {"weights": 14.5, "profile": 3.0}


def test_reading_the_checkpoint_is_a_part_of_loading_it(tmp_path, monkeypatch):
    """The part is told apart, since the disk bounds only that; a CPU worker tells no more than it."""
    monkeypatch.setenv(PHASE_FILE, str(tmp_path / "cpu.jsonl"))
    PhaseHandler().emit(record("Loading weights took %.2f seconds", 9.0))
    ledger = StartLedger("abc")
    ledger.read_engine_phases(tmp_path / "cpu.jsonl")
    assert ledger.phases == {"read": 9.0, "weights": 9.0}
    PhaseHandler().emit(record("Model loading took %s GiB memory and %.6f seconds", "1", 12.0))
    ledger = StartLedger("abc")
    ledger.read_engine_phases(tmp_path / "cpu.jsonl")
    assert ledger.phases == {"read": 9.0, "weights": 12.0}


def test_messages_are_ignored_where_no_file_is_named(tmp_path, monkeypatch):
    """Engines outside of a replica are not disturbed: no file appears."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PHASE_FILE, raising=False)
    PhaseHandler().emit(record("Model loading took %s GiB memory and %.6f seconds", "1", 1.0))
    assert list(tmp_path.iterdir()) == []


def test_a_phase_is_recorded_also_when_it_fails():
    """The ledger then says where the start ended."""
    ledger = StartLedger("abc")
    with pytest.raises(RuntimeError), ledger.phase("config"):
        raise RuntimeError
    assert list(ledger.phases) == ["config"]


def test_the_ledger_is_one_json_line_a_start(tmp_path):
    """Each start adds a line with phases, memory and engine facts."""
    ledger = StartLedger("abc")
    for _ in range(2):
        record = ledger.line({"schema": 2}, [{"rank": 0, "kv_bytes": 5}], {"block_size": 16})
        append(tmp_path / "state" / "starts.jsonl", record)
    lines = (tmp_path / "state" / "starts.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0])["memory"] == [{"rank": 0, "kv_bytes": 5}]
    assert json.loads(lines[0])["schema"] == 2


def test_a_ledger_that_cannot_be_written_costs_no_replica(tmp_path, caplog):
    """The failure is a warning."""
    (tmp_path / "state").write_text("a file where the folder should be")
    append(tmp_path / "state" / "starts.jsonl", {"revision": "abc"})
    assert "was not written" in caplog.text


def test_memory_terms_that_a_worker_does_not_measure_are_left_out():
    """The CPU worker has fewer terms than the CUDA one."""

    class Worker(MemoryReport):
        rank = 3
        requested_memory = 80

    assert Worker().rayserve_memory() == {"rank": 3, "requested_bytes": 80}


def test_a_gpu_worker_names_its_gpu(monkeypatch):
    """Name and total as vLLM sees them; a platform that cannot name it costs the name alone."""

    class Snapshot:
        total_memory = 85 * 10**9

    class Worker(MemoryReport):
        rank = 1
        local_rank = 1
        init_snapshot = Snapshot()

    monkeypatch.setattr("rayserve.serving.ledger.device_name", lambda index: f"GPU {index}")
    assert Worker().rayserve_memory() == {
        "rank": 1,
        "total_bytes": 85 * 10**9,
        "device_name": "GPU 1",
    }
    monkeypatch.setattr("rayserve.serving.ledger.device_name", lambda index: "")
    assert "device_name" not in Worker().rayserve_memory()


def test_time_to_first_token_is_the_mean_of_the_window():
    """Requests older than the window no longer count."""
    load = EngineLoad()
    load.first_token(0.0, 9.0)
    load.first_token(WINDOW_S, 0.1)
    load.first_token(WINDOW_S + 1, 0.3)
    assert load.ttft_ms(WINDOW_S + 2) == pytest.approx(200.0)
    assert load.ttft_ms(10 * WINDOW_S) == 0.0


def test_first_tokens_beyond_the_window_are_forgotten_without_a_reader():
    """Where nobody asks for the mean, as without autoscaling, memory stays as small as the window."""
    load = EngineLoad()
    for second in range(1000):
        load.first_token(float(second), 0.1)
    assert len(load._first_tokens) <= WINDOW_S + 1


def test_a_step_replaces_the_counts():
    """The load is what the last step reported."""
    load = EngineLoad()
    load.step(1.0, running=3, waiting=2, kv_usage=0.5)
    load.step(2.0, running=1, waiting=0, kv_usage=0.1)
    assert (load.running, load.waiting, load.kv_usage, load.steps) == (1, 0, 0.1, 2)


@pytest.mark.parametrize(
    "file, profile, environ, host, allowed",
    [
        ("/keys", "production", {HAPROXY_SWITCH: "1"}, "0.0.0.0", True),
        ("", "local", {}, "127.0.0.1", True),
        ("", "local", {}, "localhost", True),
        ("", "local", {}, "::1", True),
        ("", "local", {}, "0.0.0.0", False),
        ("", "local", {}, "gateway.internal", False),
        ("", "local", {HAPROXY_SWITCH: "1"}, "127.0.0.1", False),
        ("", "production", {}, "127.0.0.1", False),
    ],
)
def test_a_door_without_keys_is_for_a_local_plan_on_loopback(file, profile, environ, host, allowed):
    """Anything else without keys is refused, whoever deploys it."""
    error = error_of(check_keys, file, profile, environ, lambda: host)
    assert (error is None) is allowed
    assert error is None or (isinstance(error, HostError) and "API key file" in error.needed)


PLAN = read_plan(str(ROOT / "inventories/lab/group_vars/all/plan.yml"))
LIMITS = live_plan(PLAN).model_dump(mode="json")


def limits(**door: object) -> dict[str, object]:
    """What Serve hands to a replica, with the door changed."""
    return {**LIMITS, "door": {**LIMITS["door"], **door}}


@pytest.fixture
def serve_on(monkeypatch):
    """Say where Serve's proxies listen, and that its own proxy is used."""
    monkeypatch.delenv(HAPROXY_SWITCH, raising=False)
    return lambda host: monkeypatch.setattr("rayserve.serving.guards.serve_host", lambda: host)


def test_a_replica_without_keys_is_refused_before_its_engine(serve_on):
    """The whole judgement of the door's keys falls on the limits that are known beforehand."""
    serve_on("127.0.0.1")
    with pytest.raises(HostError, match="profile production"):
        check_limits(limits(api_key_file=""), "production")
    assert error_of(check_limits, limits(api_key_file=""), "local") is None
    serve_on("10.0.0.1")
    with pytest.raises(HostError, match=r"Serve listens on 10\.0\.0\.1"):
        check_limits(limits(api_key_file=""), "local")


def placed(executor: str, *bundles: dict[str, int]) -> Placement:
    """A gang of two ranks."""
    return Placement(
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        strategy="STRICT_PACK",
        bundles=list(bundles),
        executor=executor,
    )


@pytest.mark.parametrize("held", [["0", "1"], ["0"], [], ["0", "1", "2"]])
def test_a_replica_on_one_host_holds_exactly_its_gpus(monkeypatch, held):
    """With fewer it would use somebody else's, and what it holds beyond them would lie idle."""
    monkeypatch.setattr("ray.get_gpu_ids", lambda: held)
    error = error_of(check_gang, placed("mp", {"GPU": 2}))
    assert (error is None) is (len(held) == 2)
    told = ("2 GPUs held by this replica", str(len(held)))
    assert error is None or (error.needed, error.found) == told


@pytest.mark.parametrize(
    "placement", [placed("ray", {"GPU": 1}, {"GPU": 1}), placed("mp", {"CPU": 2})]
)
def test_a_gang_of_many_bundles_or_without_gpus_is_not_counted(monkeypatch, placement):
    """Across hosts the replica's own process holds no GPU, and some engines need none."""
    monkeypatch.setattr("ray.get_gpu_ids", list)
    assert error_of(check_gang, placement) is None


NICE = NamedValue(name="RAY_worker_niceness", value="0")


@pytest.mark.parametrize(
    "required, value, profile, found",
    [
        ([NICE], "0", "production", ""),
        ([NICE], None, "production", "missing RAY_worker_niceness=0"),
        ([NICE], "15", "production", "missing RAY_worker_niceness=0"),
        ([], "0", "production", "missing all of it in the Serve config"),
        ([NICE], None, "local", ""),
        ([], None, "local", ""),
    ],
)
def test_a_production_replica_wants_the_plans_environment(
    monkeypatch, caplog, required, value, profile, found
):
    """On its own node; elsewhere what is missing is a warning in its log."""
    monkeypatch.delenv(NICE.name, raising=False)
    if value is not None:
        monkeypatch.setenv(NICE.name, value)
    with caplog.at_level("WARNING", "ray.serve"):
        error = error_of(check_environment, required, profile)
    assert ("" if error is None else error.found) == found
    assert error is None or isinstance(error, HostError)
    warned = "this Ray node lacks RAY_worker_niceness=0" in caplog.text
    assert warned is (profile == "local" and bool(required))


def test_a_key_file_is_read_before_the_engine_starts(serve_on, tmp_path):
    """One that cannot be used is named; a good one makes it irrelevant where Serve listens."""
    serve_on("10.0.0.1")
    file = tmp_path / "keys"
    with pytest.raises(HostError, match=str(file)):
        check_limits(limits(api_key_file=str(file)), "production")
    file.touch(mode=0o600)
    file.write_text("a-key-of-sixteen-characters\n")
    assert error_of(check_limits, limits(api_key_file=str(file)), "production") is None


@pytest.mark.parametrize(
    "wrong, key",
    [
        (None, "`user_config`"),
        ([], "`user_config`"),
        ({"door": LIMITS["door"]}, "`user_config.scaling`"),
        (limits(max_queued="many"), "`user_config.door.max_queued`"),
        (limits(api_key_file=10**6000), "`user_config.door.api_key_file`"),
    ],
)
def test_what_are_no_limits_is_told_as_our_own_error(wrong, key):
    """One message that names the key, and not pydantic's list."""
    with pytest.raises(PlanError, match=key) as error:
        check_limits(wrong, "production")
    assert "pydantic" not in str(error.value)
    assert "rayserve plan" in error.value.do


def test_the_logging_level_that_the_environment_asks_for_is_kept(tmp_path, monkeypatch):
    """Our configuration replaces vLLM's own, which is where it would read the level."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    config = json.loads(write_logging_config(tmp_path).read_text())
    assert config["loggers"]["vllm"]["level"] == "DEBUG"
    assert config["handlers"]["vllm"]["level"] == "DEBUG"


def test_a_disk_that_is_full_stops_no_engine(tmp_path, monkeypatch):
    """The phase is lost; the message that carried it goes on."""
    monkeypatch.setenv(PHASE_FILE, str(tmp_path / "no" / "such" / "folder"))
    PhaseHandler().emit(record("Loading weights took %.2f seconds", 1.0))
    assert list(tmp_path.iterdir()) == []


def test_a_phase_line_that_was_cut_short_is_skipped(tmp_path):
    """What can be read is kept."""
    file = tmp_path / "phases.jsonl"
    file.write_text('{"phase": "weights", "seconds": 2.0}\n{"phase": "pro')
    ledger = StartLedger("abc")
    ledger.read_engine_phases(file)
    assert ledger.phases == {"weights": 2.0}
