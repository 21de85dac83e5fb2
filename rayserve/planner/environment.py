"""Which environment variables must Ray's processes and the replica's processes have?

Serve reads its timers from the environment of each node, once, at import. So they stand in the
plan and are set where Ray starts; a replica's own come with its deployment.
"""

from __future__ import annotations

import math

from rayserve.engine import validate_env
from rayserve.errors import SpecError
from rayserve.haproxy import FOLDER_CHARACTERS, HAPROXY_BINARY, haproxy_files
from rayserve.plan import NamedValue
from rayserve.planner.catalogue import Gpu
from rayserve.spec import ClusterSpec

DRAIN_FLOOR_S = 5
"""Least time that a stopping replica stays reachable, so that HAProxy sees it leave."""
ASSUMED_TPOT_MS = 50
"""Time of a token where nothing is promised: an assumption, slow for one GPU host."""
RELOAD_MARGIN_S = 30
"""Time for a change of replicas to reach every HAProxy."""
HARD_STOP = (
    "each change of replicas, growth too, reloads HAProxy, and what still runs this long after is "
    "cut: above timeouts.drain_s and the longest stream, {stream_s} s = {max_tokens} tokens at "
    "{tpot_ms:g} ms ({whose})"
)
HAPROXY_FILES = "not in /tmp: whoever reaches HAProxy's admin socket there controls it"
CLIENT_TIMEOUT_S = 3600
"""Serve's default limit of a client's silence behind HAProxy."""


def node_environment(spec: ClusterSpec, max_tokens: int) -> list[NamedValue]:
    """What every Ray node needs before Ray starts (`rayserve env`).

    `max_tokens` is the longest answer, which bounds how long a stream may take.

    Raises:
        SpecError: below `state_dir`, HAProxy's sockets would have longer paths than it binds.
    """
    values = [
        NamedValue(name="RAY_USAGE_STATS_ENABLED", value="0", reason="nothing is reported"),
        NamedValue(
            name="RAY_worker_niceness",
            value="0",
            reason="Ray gives its workers 15: everything else on the host would come first",
        ),
        NamedValue(
            name="RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD",
            value="0",
            reason="tokens cross no thread",
        ),
        NamedValue(
            name="RAY_SERVE_CONTROL_LOOP_INTERVAL_S",
            value="0.5",
            reason="at Serve's own 0.1 s an idle controller does twice the work; replicas change rarely",
        ),
        NamedValue(
            name="RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS",
            value="1",
            reason="a hung replica gives its GPUs back at once, not after the drain limit",
        ),
    ]
    if spec.profile == "production":
        values.append(
            NamedValue(
                name="RAY_AUTH_MODE",
                value="token",
                reason="Ray's dashboard and ports run whatever they are sent: only with the token, "
                "which is the same file on every host",
            )
        )
    if spec.endpoint.ingress == "haproxy":
        values += _haproxy(spec, max_tokens)
    return values


def _haproxy(spec: ClusterSpec, max_tokens: int) -> list[NamedValue]:
    drain_s = math.ceil(spec.timeouts.drain_s)
    tpot_ms, whose = spec.slo.tpot_ms, "slo.tpot_ms"
    if not tpot_ms:
        tpot_ms, whose = ASSUMED_TPOT_MS, "assumed, since slo.tpot_ms is not set"
    stream_s = math.ceil(max_tokens * tpot_ms / 1000)
    hard_stop_s = max(drain_s, stream_s) + RELOAD_MARGIN_S
    quarantine_s = hard_stop_s + RELOAD_MARGIN_S
    values = [
        ("RAY_SERVE_ENABLE_HA_PROXY", 1, "Serve's fast way in"),
        (
            HAPROXY_BINARY,
            "rayserve-haproxy",
            "without splice, with which it misses clients that leave; `rayserve env` has the path",
        ),
        (
            "RAY_SERVE_HAPROXY_RETRY_ON",
            "conn-failure 503",
            "a replica that answers 503 has begun nothing: another one takes the request",
        ),
        (
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S",
            hard_stop_s,
            HARD_STOP.format(
                stream_s=stream_s, max_tokens=max_tokens, tpot_ms=tpot_ms, whose=whose
            ),
        ),
        (
            "RAY_SERVE_PORT_QUARANTINE_S",
            quarantine_s,
            "a stopped replica's port stays unused while an old HAProxy may still send to it",
        ),
        (
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
            min(DRAIN_FLOOR_S, drain_s),
            "an idle replica stops this soon",
        ),
    ]
    if hard_stop_s > CLIENT_TIMEOUT_S:
        values.append(
            ("RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S", hard_stop_s, "not below the longest stream")
        )
    if spec.profile == "production":
        values += [(name, path, HAPROXY_FILES) for name, path in _haproxy_files(spec).items()]
    return [NamedValue(name=name, value=str(value), reason=why) for name, value, why in values]


def _haproxy_files(spec: ClusterSpec) -> dict[str, str]:
    folder = f"{spec.state_dir.rstrip('/')}/haproxy"
    if len(folder) > FOLDER_CHARACTERS:
        most = FOLDER_CHARACTERS - len("/haproxy")
        raise SpecError(
            f"`state_dir` of at most {most} characters: HAProxy's sockets lie deep below it",
            found=f"{spec.state_dir}, {len(spec.state_dir)} characters",
            do="write a shorter one, such as /var/lib/rayserve",
            where=spec.where("state_dir"),
        )
    return haproxy_files(folder)


def replica_environment(spec: ClusterSpec, gpu: Gpu | None) -> list[NamedValue]:
    """The environment of a replica's processes; `env` of the spec comes last and wins.

    Raises:
        EngineArgumentError: an entry of `env` that the toolkit owns or vLLM does not know.
    """
    guess = spec.speculative
    local = bool(spec.model.path) and not (guess is not None and guess.from_hub)
    start_s = math.ceil(spec.timeouts.start_s)
    rows = [
        ("VLLM_ENGINE_READY_TIMEOUT_S", str(start_s), "the start budget; vLLM's own is 600 s"),
        ("VLLM_NO_USAGE_STATS", "1", "nothing is reported"),
        ("DO_NOT_TRACK", "1", "nothing is reported"),
        ("HF_HUB_DISABLE_TELEMETRY", "1", "nothing is reported"),
        ("HF_HUB_OFFLINE", "1" if local else "0", "the weights are on disk" if local else ""),
        ("VLLM_SERVER_DEV_MODE", "0", "its paths stop or rewrite the engine"),
        ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0", "requests load no files"),
        ("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0", "a redirect leaves the allowed domains"),
    ]
    if gpu is None:
        rows += [
            ("VLLM_CPU_OMP_THREADS_BIND", "nobind", "logical GPUs own no cores"),
            ("OMP_NUM_THREADS", "1", "ranks share the cores"),
        ]
    values = {name: NamedValue(name=name, value=value, reason=why) for name, value, why in rows}
    for name, value in spec.env.items():
        validate_env(name, value, spec.where("env", name))
        values[name] = NamedValue(name=name, value=_text(value))
    return list(values.values())


def _text(value: str | float | bool) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
