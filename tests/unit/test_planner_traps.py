"""Is every silent trap of Ray Serve and vLLM impossible by construction, or refused?

A silent trap is a setting that is accepted and then ignored, waits for ever, cuts a stream or opens
a door, without a word. Each has a test here that names it.
"""

from __future__ import annotations

import json
import re

import pytest

from rayserve.errors import EngineArgumentError, SpecError
from rayserve.haproxy import HAPROXY_SOCKET, haproxy_files
from rayserve.ports import NAMED, REPLICAS, WORKERS
from rayserve.serve_config import serve_config
from tests.bad_specs import CASES, CONFIG, ROOT
from tests.golden_specs import SPECS, plan_of
from tests.plans import planned
from tests.yaml_text import load_yaml

BASE = load_yaml(CASES.read_text())["base"]
MODEL = json.loads(CONFIG.read_text())


def plan(add: str = "", swap: tuple[str, str] = ("", ""), also: tuple[str, str] = ("", "")):
    """The plan of the base spec with changes."""
    text = BASE
    for old, new in (swap, also):
        assert old in BASE
        text = text.replace(old, new) if old else text
    return planned(text + add, MODEL)


def environment(**changes):
    """The environment of the Ray nodes as a mapping."""
    return {item.name: item.value for item in plan(**changes).environment}


def test_trap_label_that_no_node_carries():
    """Ray accepts accelerator_type A100-80G and waits for ever: we refuse it and ask for A100."""
    swap = ("gpus_per_host: 8", "gpus_per_host: 8\n      accelerator_type: A100-80G")
    with pytest.raises(SpecError, match="wait for ever"):
        plan(swap=swap)
    assert plan().replica.placement.bundles == [{"GPU": 8.0, "accelerator_type:A100": 0.001}]


def test_trap_gang_spread_over_hosts():
    """Serve's LLM default PACK may split a TP group over half-busy hosts: ours is STRICT_PACK."""
    for path in SPECS:
        placement = plan_of(path).replica.placement
        if placement.executor == "mp":
            assert placement.strategy == "STRICT_PACK"
            assert len(placement.bundles) == 1
            assert placement.bundles[0]["GPU"] == placement.gpus


def test_trap_executor_left_to_vllm():
    """Inside a placement group vLLM would choose Ray's executor: the plan always says which."""
    for path in SPECS:
        placement = plan_of(path).replica.placement
        one_host = len(placement.bundles) == 1
        assert placement.executor == ("mp" if one_host else "ray")
    with pytest.raises(EngineArgumentError):
        plan("  engine_args:\n    distributed_executor_backend: ray\n")


def test_trap_target_of_a_billion_requests():
    """ray.serve.llm never scales, since its target is 1e9: ours is below what a replica runs."""
    made = plan()
    assert 0 < made.scaling.target_in_flight <= made.door.max_in_flight == 32
    override = serve_config(made)["applications"][0]["deployments"][0]
    assert override["max_ongoing_requests"] < 10_000


def test_trap_engine_start_limit_of_600_seconds():
    """vLLM gives up after 600 s whatever the start budget: the plan raises its limit to the budget."""
    made = plan("  timeouts:\n    start_s: 1800\n")
    env = {item.name: item.value for item in made.replica.env}
    assert env["VLLM_ENGINE_READY_TIMEOUT_S"] == "1800"
    assert made.replica.start_timeout_s == 1800


def test_trap_stream_batching():
    """ray.serve.llm batches tokens for 50 ms: what Serve runs is our own app, and nothing imports it."""
    (application,) = serve_config(plan())["applications"]
    assert application["import_path"] == "rayserve.app:build"
    imports = re.compile(r"^\s*(from|import)\s+ray\.(serve\.)?llm", re.MULTILINE)
    sources = [path.read_text() for path in (ROOT / "rayserve").rglob("*.py")]
    assert len(sources) > 40
    assert not any(imports.search(source) for source in sources)


@pytest.mark.parametrize(
    "add",
    ["  engine_args:\n    api_key: [secret]\n", "  env:\n    VLLM_API_KEY: secret\n"],
    ids=["argument", "variable"],
)
def test_trap_api_key_that_nobody_checks(add):
    """Serve ignores api_key and vLLM leaves paths open: both are refused; the door has a file."""
    with pytest.raises(EngineArgumentError, match=r"endpoint\.api_key_file"):
        plan(add)


ONE_HOST = ("hosts: 2", "hosts: 1")
LOOPBACK = ("host: 0.0.0.0", "host: 127.0.0.1")


def test_trap_haproxy_on_every_address():
    """Serve's default for HAProxy is 0.0.0.0, without TLS: what the spec says is bound, and noted."""
    with pytest.raises(SpecError, match="api_key_file"):
        plan(swap=("    api_key_file: /etc/rayserve/api_keys", "    ingress: haproxy"))
    made = plan()
    assert serve_config(made)["http_options"]["host"] == made.endpoint.host == "0.0.0.0"
    assert any("without TLS" in note for note in made.notes)
    private = plan(swap=ONE_HOST, also=LOOPBACK)
    assert serve_config(private)["http_options"]["host"] == "127.0.0.1"
    assert not any("without TLS" in note for note in private.notes)
    assert any("8404" in note for note in private.notes)


def test_trap_haproxy_that_reaches_no_replica():
    """Replicas bind HAProxy's own address: one that it does not reach them by is refused."""
    with pytest.raises(SpecError, match="other of 2 hosts"):
        plan(swap=LOOPBACK)
    with pytest.raises(SpecError, match="by loopback"):
        plan(swap=ONE_HOST, also=("host: 0.0.0.0", "host: 10.0.0.5"))


def test_trap_haproxy_socket_for_every_user():
    """Serve's admin socket takes commands of every local user, in /tmp: ours lies in the state folder."""
    files = haproxy_files("/var/lib/rayserve/haproxy")
    assert files.items() <= environment().items()
    assert len(f"/var/lib/rayserve/haproxy/{'n' * 56}/admin.sock") <= 97
    elsewhere = environment(add="  state_dir: /srv/state\n")
    assert elsewhere["RAY_SERVE_HAPROXY_SOCKET_PATH"] == "/srv/state/haproxy/admin.sock"
    assert not any(value.startswith("/tmp") for value in environment().values())


@pytest.mark.parametrize("length, refused", [(21, False), (22, True)])
def test_trap_haproxy_socket_with_too_long_a_path(length, refused):
    """HAProxy would not start below a folder that is too deep: `state_dir` is refused."""
    add = f"  state_dir: /{'s' * (length - 1)}\n"
    if refused:
        with pytest.raises(SpecError, match="at most 21 characters"):
            plan(add)
    else:
        assert len(environment(add=add)[HAPROXY_SOCKET]) + 57 == 97


@pytest.mark.parametrize("drain_s", [30, 600, 4000])
def test_trap_haproxy_cuts_old_streams(drain_s):
    """HAProxy's hard stop (120 s) kills streams after a reload: ours lies above the drain limit."""
    env = environment(add=f"  timeouts:\n    drain_s: {drain_s}\n")
    hard_stop_s = int(env["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])
    assert hard_stop_s > drain_s
    assert int(env["RAY_SERVE_PORT_QUARANTINE_S"]) > hard_stop_s
    assert int(env.get("RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S", 3600)) >= drain_s


def test_trap_shut_door_while_another_replica_serves():
    """Serve's HAProxy hands a replica's 503 to the client: ours asks another replica first."""
    assert "503" in environment()["RAY_SERVE_HAPROXY_RETRY_ON"].split()


@pytest.mark.parametrize(
    "add, stream_s",
    [
        ("  slo: {tpot_ms: 100}\n  door: {max_tokens: 8000}\n", 800),
        ("  slo: {tpot_ms: 100}\n", 1638.4),
        ("  door: {max_tokens: 16000}\n", 800),
    ],
    ids=["promised", "whole context", "assumed"],
)
def test_trap_haproxy_cuts_the_longest_stream(add, stream_s):
    """Growth reloads HAProxy too: its hard stop lies above the longest answer, and says of what."""
    (item,) = [
        item for item in plan(add).environment if item.name == "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
    ]
    assert stream_s < int(item.value) < stream_s + 60
    assert ("assumed" in item.reason) == ("tpot" not in add)


def test_trap_stream_cut_after_20_seconds():
    """Serve stops a replica after 20 s: the drain limit of the plan takes that place."""
    override = serve_config(plan())["applications"][0]["deployments"][0]
    assert override["graceful_shutdown_timeout_s"] == 600


def test_trap_hung_replica_drains():
    """Serve drains even a hung replica, which keeps its GPUs: force-stop is on."""
    assert environment()["RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"] == "1"


def test_trap_idle_replica_takes_30_seconds_to_stop():
    """Behind HAProxy every stop takes 30 s: the floor is lowered, never above the drain limit."""
    assert environment()["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] == "5"
    short = environment(add="  timeouts:\n    drain_s: 2\n")
    assert short["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] == "2"


def test_trap_scaling_edit_restarts_the_model():
    """Scaling settings inside `args` restart a replica: they, and all limits, stand in the override."""
    first = serve_config(plan())["applications"][0]
    changed = plan(
        "  replicas:\n    max: 2\n  door: {max_queued: 1, max_body_mib: 1, max_n: 2,"
        " key_concurrency: 3, key_tokens_per_minute: 9, retry_after_s: 7}\n"
        "  timeouts:\n    drain_s: 60\n"
    )
    second = serve_config(changed)["applications"][0]
    assert first["args"] == second["args"]
    assert first["deployments"] != second["deployments"]
    assert changed.revision == plan().revision
    # The one limit at the door that the engine has too, as the reference says.
    assert plan("  door: {max_tokens: 4096}\n").revision != plan().revision


def test_trap_open_dashboard():
    """Ray's dashboard runs what anybody sends it: in production every node asks for Ray's token."""
    assert environment()["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize("port", [*NAMED, WORKERS[0], REPLICAS[-1]])
def test_trap_taken_port(port):
    """Nothing of ours listens where Ray's processes, its workers, Serve's replicas or its HAProxy do."""
    with pytest.raises(SpecError, match="a port of its own"):
        plan(swap=("    api_key_file", f"    port: {port}\n    api_key_file"))


def test_trap_engine_shutdown_without_drain():
    """vLLM's shutdown_timeout is 0 without a word: it is ours, stands in the plan, and says why."""
    item = next(i for i in plan().replica.engine_args if i.name == "shutdown_timeout")
    assert "drain" in item.reason
    with pytest.raises(EngineArgumentError, match=r"timeouts\.drain_s"):
        plan("  engine_args:\n    shutdown_timeout: 30\n")


def test_trap_lora_from_the_cloud_alone():
    """Serve's LoRA takes cloud addresses alone; ours takes local folders alone."""
    add = "  lora:\n    adapters:\n      - {name: a, path: PATH}\n"
    assert plan(add.replace("PATH", "/srv/a")).replica.lora_adapters[0].path == "/srv/a"
    with pytest.raises(SpecError, match="every host's disk"):
        plan(add.replace("PATH", "s3://b/a"))


def test_trap_empty_list_of_media_domains():
    """vLLM takes an empty list of media domains for all of them: none is a domain that cannot be."""
    args = plan().replica.engine_arguments()
    assert args["allowed_media_domains"] == ["no-media.invalid"]
    env = {item.name: item.value for item in plan().replica.env}
    assert env["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"


def test_trap_sampling_from_a_file_of_the_checkpoint():
    """generation_config.json would change sampling behind the plan: only the plan's values count."""
    args = plan().replica.engine_arguments()
    assert args["generation_config"] == "vllm"
    assert args["override_generation_config"] == {"temperature": 0.7, "top_p": 0.9, "top_k": 40}


@pytest.mark.parametrize("add, cap", [("", None), ("  door: {max_tokens: 4096}\n", 4096)])
def test_trap_answer_without_a_limit(add, cap):
    """A request that names no max_tokens passes the door: the engine caps it at door.max_tokens."""
    made = plan(add)
    sampling = made.replica.engine_arguments()["override_generation_config"]
    assert sampling.get("max_new_tokens") == cap
    # Without one, the context is the bound, and the door's is the same.
    assert made.door.max_tokens == (cap or made.replica.engine_arguments()["max_model_len"])


def test_trap_inherited_switches():
    """Dangerous switches are set off in the replica, whatever its host's environment says."""
    env = {item.name: item.value for item in plan().replica.env}
    assert env["VLLM_SERVER_DEV_MODE"] == "0"
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "0"
    assert env["DO_NOT_TRACK"] == env["VLLM_NO_USAGE_STATS"] == "1"
    assert environment()["RAY_USAGE_STATS_ENABLED"] == "0"


def test_trap_replica_that_can_never_be_placed():
    """More replicas than whole gangs would stay pending for ever: refused with the number."""
    from rayserve.errors import DoesNotFitError

    with pytest.raises(DoesNotFitError, match="write max: 2"):
        plan("  replicas:\n    max: 3\n")


def test_no_secret_in_plan_or_serve_config(tmp_path, monkeypatch):
    """Neither an API key nor a token of the environment crosses to plan and Serve config."""
    secrets = {"key": "k-0123456789abcdef", "hub": "hf_0123456789abcdef", "ray": "r-0123456789ab"}
    keys = tmp_path / "api_keys"
    keys.touch(mode=0o600)
    keys.write_text(secrets["key"] + "\n")
    monkeypatch.setenv("HF_TOKEN", secrets["hub"])
    monkeypatch.setenv("VLLM_API_KEY", secrets["key"])
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets["ray"])
    made = plan(swap=("/etc/rayserve/api_keys", str(keys)))
    text = json.dumps(serve_config(made)) + json.dumps(made.as_dict())
    assert str(keys) in text
    assert [name for name, secret in secrets.items() if secret in text] == []
