"""Which key of cluster.yml does a flag of vLLM become? The model, numbers, limits, hosts and endpoint.

What has no key goes to `engine_args`; what the toolkit owns is left out, with what to write instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from rayserve.engine import VLLM_VERSION, load_snapshot, validate
from rayserve.engine.flags import COMMAND_LINE_ONLY, Presence, changes, histories
from rayserve.errors import EngineArgumentError
from rayserve.owned import OWNED_ARGS
from rayserve.planner.convert.draft import (
    HUMAN_INTS,
    SECRET,
    BadValueError,
    Draft,
    Setting,
    excerpt,
    number,
    shown,
    switch,
    typed,
    whole,
)
from rayserve.ports import taken_by
from rayserve.spec import nearest
from rayserve.units import GIB
from rayserve.veil import veiled

Handler = Callable[[Draft, Setting], None]
HOST_GPUS = 8
"""GPUs of a host where neither command nor options say: the usual size of an NVLink host."""
MOST_UTILIZATION = 0.98
MOST_RANKS = 1024
DTYPES = {"half": "float16", "float": "float32"}
_ELSEWHERE = re.compile(r"\$\{?\w|\{\{|^<.*>$")
"""A variable, a template's hole or a placeholder, in the place of a value."""
KEY_FILE = "/etc/rayserve/api_keys"


def engine_argument(draft: Draft, setting: Setting) -> None:
    """Carry a flag that has no key of its own under `engine_args`, or say why not."""
    if setting.name in OWNED_ARGS or setting.name in COMMAND_LINE_ONLY:
        owned(draft, setting)
        return
    value = typed(setting)
    if _holds_secret(value):
        draft.leave(setting)
        draft.find(
            "warning",
            "secret",
            setting,
            f"{setting.written} holds a secret, which is not repeated here",
            why="cluster.yml and plan.yml are read by many, and kept in version control",
            do="leave it out: nothing hands a secret to the engine, which can read it from a file on the hosts alone",
        )
        return
    try:
        validate(setting.name, value)
    except EngineArgumentError as error:
        draft.find(
            "error",
            "wrong_value",
            setting,
            f"{setting.written} does not take {shown(setting)}",
            why=f"vLLM {VLLM_VERSION} needs {error.needed}",
            do=error.do,
            certainty="read",
            source=f"the arguments of vLLM {VLLM_VERSION}",
        )
        draft.leave(setting)
        return
    draft.carry(setting, f"engine_args.{setting.name}", value)


def _holds_secret(value: object) -> bool:
    text = json.dumps(value, ensure_ascii=False)
    return veiled(text) != text or any(SECRET.search(key) for key in re.findall(r'"(\w+)":', text))


def owned(draft: Draft, setting: Setting) -> None:
    """Leave out what the toolkit owns, and say what to write instead."""
    draft.find(
        "note",
        "owned",
        setting,
        f"{setting.written} is the toolkit's own",
        why="it belongs to placement, door, timers or the safety of the host",
        do=OWNED_ARGS.get(setting.name, "leave it out"),
    )
    draft.leave(setting)


def unsaid(draft: Draft, setting: Setting, what: str, why: str, do: str) -> None:
    """Tell that a flag has no key with quite its meaning."""
    draft.find("warning", "not_the_same", setting, what, why=why, do=do)


def wrong(draft: Draft, setting: Setting, error: BadValueError) -> None:
    """Leave out a flag whose words make no value."""
    found = f"`{shown(setting)}`" if setting.values else "nothing"
    draft.leave(setting)
    if _ELSEWHERE.search(setting.text):
        draft.find(
            "error",
            "not_seen",
            setting,
            f"the value of {setting.written} stands elsewhere: {shown(setting)}",
            why=f"it needs {error.needed}; nothing is looked up or filled in here",
            do="write the value out, and convert again",
        )
        return
    draft.find(
        "error",
        "wrong_value",
        setting,
        f"{setting.written} needs {error.needed}, found {found}",
        why="vLLM refuses to start with it",
        do=error.do or "correct the value; it is left out here, and the default applies",
    )


def choice(
    draft: Draft, setting: Setting, key: str, *, means: dict[str, str] | None = None
) -> None:
    """Carry a value of a closed set; say what became of one that left it or never was in it."""
    value = (means or {}).get(setting.text, setting.text)
    if not value:
        raise BadValueError("a value")
    known = load_snapshot().choices(setting.name)
    row = changes().values.get(setting.name, {}).get(value.lower(), {})
    if value in known:
        draft.carry(setting, key, value)
        if draft.before(row.get("since", "0.0")):
            draft.find(
                "warning",
                "newer",
                setting,
                f"vLLM {draft.context.version} does not know {setting.written} {value}",
                why=f"{value} came with {row['since']}",
                do=f"nothing: vLLM {VLLM_VERSION} takes it",
                certainty="read",
            )
        return
    close = nearest(value, map(str, known))
    gone = draft.before(row.get("gone", "0.0"))
    draft.find(
        "warning" if gone else "error",
        "wrong_value",
        setting,
        f"{setting.written} {shown(setting)} is no value of vLLM {VLLM_VERSION}",
        why=row.get("why")
        or "it takes " + ", ".join(map(str, known[:12])) + ("…" if known[12:] else ""),
        do=row.get("do") or (f"write {close}" if close else "leave it out"),
        certainty="read",
        source=row.get("source", f"the arguments of vLLM {VLLM_VERSION}"),
    )
    if row.get("means"):
        draft.carry(setting, key, row["means"])
    else:
        draft.leave(setting)


def _count(key: str, most: int = 2**31) -> Handler:
    def handle(draft: Draft, setting: Setting) -> None:
        value = whole(setting.text, human=setting.name in HUMAN_INTS)
        if not 1 <= value <= most:
            raise BadValueError(f"a whole number from 1 to {most}")
        draft.carry(setting, key, value)

    return handle


def _boolean(key: str) -> Handler:
    def handle(draft: Draft, setting: Setting) -> None:
        draft.carry(setting, key, switch(setting))

    return handle


def _max_model_len(draft: Draft, setting: Setting) -> None:
    if setting.text.lower() in {"auto", "-1"}:
        draft.carry(setting, "limits.max_model_len", "auto")
        return
    value = whole(setting.text, human=True)
    if value < 1:
        raise BadValueError("a whole number of at least 1, or auto")
    draft.carry(setting, "limits.max_model_len", value)


def _utilization(draft: Draft, setting: Setting) -> None:
    value = number(setting.text)
    if not 0 < value <= 1:
        hint = f"write {value / 100:g}" if 1 < value <= 100 else ""
        raise BadValueError("a share above 0 and at most 1", hint)
    if value > MOST_UTILIZATION:
        draft.find(
            "warning",
            "limit",
            setting,
            f"{setting.written} {value:g} leaves nothing for CUDA graphs and the driver",
            why=f"the toolkit takes at most {MOST_UTILIZATION}",
            do=f"it is {MOST_UTILIZATION} here; 0.92 is the default",
        )
    draft.carry(setting, "limits.gpu_memory_utilization", min(value, MOST_UTILIZATION))


def _kv_bytes(draft: Draft, setting: Setting) -> None:
    value = whole(setting.text, human=True)
    if value < 1:
        raise BadValueError("a number of bytes of at least 1")
    draft.carry(setting, "limits.kv_cache_gib", round(value / GIB, 6))


def _dtype(draft: Draft, setting: Setting) -> None:
    choice(draft, setting, "precision.dtype", means=DTYPES)


def _eager(draft: Draft, setting: Setting) -> None:
    draft.carry(setting, "scheduling.cuda_graphs", not switch(setting))


def _seed(draft: Draft, setting: Setting) -> None:
    value = whole(setting.text, human=False)
    if not 0 <= value < 2**32:
        raise BadValueError("a seed from 0 to 4294967295")
    draft.carry(setting, "seed", value)


def _host(draft: Draft, setting: Setting) -> None:
    host = {"localhost": "127.0.0.1", "::1": "127.0.0.1", "::": "0.0.0.0"}.get(
        setting.text, setting.text
    )
    if host not in {"127.0.0.1", "0.0.0.0"}:
        draft.find(
            "note",
            "owned",
            setting,
            f"{setting.written} {shown(setting)} becomes 0.0.0.0",
            why="HAProxy reaches the replicas of its host by loopback, those of others by address",
            do="keep the port closed to all but the gateway",
        )
        host = "0.0.0.0"
    draft.carry(setting, "endpoint.host", host)


def _port(draft: Draft, setting: Setting) -> None:
    port = whole(setting.text, human=False)
    taken = taken_by(port)
    if not 1024 <= port <= 65535 or taken:
        draft.find(
            "warning",
            "limit",
            setting,
            f"{setting.written} {port} becomes 8000",
            why=f"that is of {taken}" if taken else "Serve listens from 1024 to 65535",
            do="let the gateway listen where clients expect it",
        )
        port = 8000
    draft.carry(setting, "endpoint.port", port)


def _api_key(draft: Draft, setting: Setting) -> None:
    draft.carry(setting, "endpoint.api_key_file", KEY_FILE)
    draft.find(
        "warning",
        "secret",
        setting,
        f"{setting.written} holds a secret, which is not repeated here",
        why="a command line is readable by every user of the host, and stays in the shell's history",
        do=f"write one key a line to {KEY_FILE}, and take a new key if this one was pasted anywhere",
    )


def _trust(draft: Draft, setting: Setting) -> None:
    draft.leave(setting)
    if switch(setting):
        draft.find(
            "warning",
            "unsafe",
            setting,
            f"{setting.written} is left out",
            why="it runs code that comes with the checkpoint, with all rights of the service",
            do="most architectures are in vLLM itself; else convert the checkpoint to one that is",
        )


def _replicas(draft: Draft, setting: Setting) -> None:
    count = whole(setting.text, human=False)
    if not 1 <= count <= MOST_RANKS:
        raise BadValueError(f"a whole number from 1 to {MOST_RANKS}")
    draft.carry(setting, "replicas.min", count)
    draft.put("replicas.max", count)
    if count > 1:
        draft.find(
            "warning",
            "not_the_same",
            setting,
            f"{count} data-parallel ranks become {count} replicas",
            why="each is an engine of its own with all weights; ranks of one engine share the experts "
            "of a mixture of experts, which replicas do not",
            do="plan it: where the weights of a replica do not fit, more tensor ranks hold them",
        )


def _nodes(draft: Draft, setting: Setting) -> None:
    draft.given["nnodes"] = setting
    draft.leave(setting)


def _served_name(draft: Draft, setting: Setting) -> None:
    seen = [name for name in setting.values if name and not _ELSEWHERE.search(name)]
    if not seen:
        raise BadValueError("a name")
    first, others = seen[0], setting.values[1:]
    draft.carry(setting, "model.served_name", first)
    if others:
        draft.find(
            "warning",
            "not_the_same",
            setting,
            f"only `{excerpt(first)}` is served; {len(others)} more names are left out",
            why="one model has one name here",
            do="let the gateway rewrite the others",
        )


def _config_file(draft: Draft, setting: Setting) -> None:
    draft.leave(setting)
    draft.find(
        "warning",
        "not_seen",
        setting,
        f"the flags in {shown(setting)} are not seen here",
        why="nothing is read but the text itself",
        do="add them to the command line, and convert it again",
    )


HANDLERS: dict[str, Handler] = {
    "api_key": _api_key,
    "config": _config_file,
    "data_parallel_size": _replicas,
    "dtype": _dtype,
    "enable_chunked_prefill": _boolean("scheduling.chunked_prefill"),
    "enable_prefix_caching": _boolean("scheduling.prefix_caching"),
    "enforce_eager": _eager,
    "gpu_memory_utilization": _utilization,
    "host": _host,
    "kv_cache_dtype": lambda draft, setting: choice(draft, setting, "precision.kv_cache_dtype"),
    "kv_cache_memory_bytes": _kv_bytes,
    "max_model_len": _max_model_len,
    "max_num_batched_tokens": _count("limits.max_num_batched_tokens"),
    "max_num_queued_reqs": _count("door.max_queued"),
    "max_num_seqs": _count("limits.max_num_seqs"),
    "nnodes": _nodes,
    "pipeline_parallel_size": _count("parallelism.pipeline", MOST_RANKS),
    "port": _port,
    "quantization": lambda draft, setting: choice(draft, setting, "precision.quantization"),
    "seed": _seed,
    "served_model_name": _served_name,
    "tensor_parallel_size": _count("parallelism.tensor", MOST_RANKS),
    "trust_remote_code": _trust,
}
LATER = {"model", "revision"}
"""Flags that `place_model` reads, when all are known."""


def known_today(name: str) -> bool:
    """Whether the pinned vLLM takes a flag."""
    history = histories().get(name)
    return history is not None and history.presence(VLLM_VERSION) == Presence.PRESENT
