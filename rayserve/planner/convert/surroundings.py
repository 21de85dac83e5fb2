"""What does a command line not say: hosts, address, sampling, and which variables still count?"""

from __future__ import annotations

import re

from rayserve.engine import validate, validate_env
from rayserve.engine.flags import changes
from rayserve.errors import EngineArgumentError
from rayserve.owned import REMOVED_ENV, SECRET_WORDS
from rayserve.planner.catalogue import CPU, gpus
from rayserve.planner.convert.draft import Draft, Placeholder
from rayserve.planner.convert.keys import HOST_GPUS, KEY_FILE
from rayserve.spec.placeholders import PLACEHOLDER
from rayserve.veil import veiled

BACKENDS = {
    "FLASHINFER_VLLM_V1": "FLASHINFER",
    "FLASH_ATTN_VLLM_V1": "FLASH_ATTN",
    "TRITON_ATTN_VLLM_V1": "TRITON_ATTN",
}
"""Names of attention backends that lost their ending (vLLM 0.11)."""
NEUTRAL = {"temperature": 1, "top_p": 1, "top_k": -1}


def environment(draft: Draft) -> None:
    """Carry variables that the engine reads; name those that it does not, never their values."""
    for name, value in draft.command.env:
        row = changes().env.get(name)
        if row is None:
            _variable(draft, name, value)
            continue
        if name == "VLLM_ATTENTION_BACKEND":
            _attention(draft, value)
        since = f"deprecated in {row['deprecated']}, " if "deprecated" in row else ""
        draft.find(
            "warning",
            "removed",
            name,
            f"{name} is not read any more",
            why=f"{since}absent from {row['gone']} on, where it changes nothing",
            do=REMOVED_ENV[name],
            certainty=row.get("certainty", "read"),
            source=row["source"],
        )


def _attention(draft: Draft, value: str) -> None:
    name = BACKENDS.get(value, value)
    try:
        validate("attention_backend", name)
    except EngineArgumentError:
        return
    if "attention_backend" not in draft.given:
        draft.put("engine_args.attention_backend", name, "from VLLM_ATTENTION_BACKEND")


def _variable(draft: Draft, name: str, value: str) -> None:
    try:
        validate_env(name, value)
    except EngineArgumentError as error:
        secret = any(word in name.upper() for word in SECRET_WORDS)
        draft.find(
            "warning" if secret else "note",
            "secret" if secret else "owned",
            name,
            f"{name} is left out" + (", and its value is not repeated" if secret else ""),
            why="" if secret else "the toolkit or the host sets it, or vLLM does not read it",
            do=error.do,
        )
        return
    if "$" in value or "{" in value or veiled(value) != value:
        draft.find(
            "note",
            "not_seen",
            name,
            f"{name} is left out: its value is not known here, or is not to be repeated",
            do="write its value under `env`, unless it is a secret: plan.yml is read by many",
        )
        return
    draft.put(f"env.{name}", value)


def hosts(draft: Draft, gpu: str) -> None:
    """Set `node_pools` and `parallelism`: a rank is a GPU, and what is not said is a placeholder."""
    tensor = draft.get("parallelism.tensor", 1)
    stages = draft.get("parallelism.pipeline", 1)
    # vLLM's own default is 1 rank; cluster.yml's is a whole host.
    draft.put("parallelism.tensor", tensor)
    draft.put("parallelism.pipeline", stages)
    ranks, gangs = tensor * stages, draft.get("replicas.min", 1)
    named = _nodes(draft)
    per_host = draft.context.gpus_per_host or draft.command.gpus
    _keep_stages(draft, draft.context.gpus_per_host or max(per_host, HOST_GPUS))
    if not per_host:
        per_host = ranks // named if named and ranks % named == 0 else min(ranks * gangs, HOST_GPUS)
        _fill(draft, "gpus_per_host", per_host, f"as the ranks ask for, at most {HOST_GPUS}")
    count = draft.context.hosts or named or -(-ranks * gangs // per_host)
    if not draft.context.hosts and not named:
        _fill(draft, "hosts", count, "as few as hold the ranks")
    device = draft.given.get("device")
    model = CPU if device is not None and device.text == CPU else gpu
    if not model:
        model = PLACEHOLDER
        _fill(draft, "gpu", model, f"one of {', '.join(gpus())}")
    pool = {"name": "gpu", "hosts": count, "gpu": model, "gpus_per_host": min(per_host, 64)}
    draft.spec["node_pools"] = [pool]


def _keep_stages(draft: Draft, per_host: int) -> None:
    """Cut ranks that one host does not hold into stages that it does."""
    tensor, stages = draft.get("parallelism.tensor"), draft.get("parallelism.pipeline")
    setting = draft.given.get("tensor_parallel_size")
    if tensor <= per_host or setting is None:
        return
    more, rest = divmod(tensor, per_host)
    if rest:
        do = (
            f"write tensor: {per_host}, and `pipeline` for more hosts; the plan refuses it as it is"
        )
    else:
        draft.put("parallelism.tensor", per_host)
        draft.put("parallelism.pipeline", stages * more)
        do = f"{per_host} ranks and {stages * more} stages are written here; "
        do += "keep them, or give --gpus-per-host where a host has more"
    draft.find(
        "error" if rest else "warning",
        "hardware",
        setting,
        f"{tensor} tensor-parallel ranks do not stay on one host of {per_host} GPUs",
        why="a stage stays on one host here: each layer sums its ranks' results twice, over NVLink; over a "
        "network that is a wait in every layer, where stages hand on one vector each",
        do=do,
    )


def _nodes(draft: Draft) -> int:
    setting = draft.given.get("nnodes")
    text = setting.text if setting is not None else ""
    return int(text) if re.fullmatch(r"[0-9]{1,4}", text) else 0


def _fill(draft: Draft, key: str, value: object, why: str) -> None:
    option = "--" + key.replace("_", "-")
    draft.placeholders.append(Placeholder(f"node_pools.{key}", value, why, option))


def endpoint(draft: Draft) -> None:
    """Set `endpoint`: address, port, and the file of keys that the toolkit asks for."""
    many = draft.spec["node_pools"][0]["hosts"] > 1
    if draft.get("endpoint.host") is None:
        draft.put("endpoint.host", "0.0.0.0", "as vLLM listens by default; keep the firewall")
    elif many and draft.get("endpoint.host") != "0.0.0.0":
        draft.put("endpoint.host", "0.0.0.0", "HAProxy reaches replicas on other hosts")
    if draft.get("endpoint.port") is None:
        draft.put("endpoint.port", 8000)
    if draft.get("endpoint.api_key_file") is None:
        draft.put("endpoint.api_key_file", KEY_FILE, "clients need a key here")


def sampling(draft: Draft) -> None:
    """vLLM samples without limits unless the checkpoint or a flag says otherwise; so does the draft."""
    given = draft.given.get("generation_config")
    for name, value in NEUTRAL.items():
        if draft.get(f"sampling.{name}") is None:
            draft.put(f"sampling.{name}", value)
    if draft.before("0.8.0") or (given is not None and given.text == "vllm"):
        return
    draft.comments["sampling"] = "vLLM takes these from the checkpoint's generation_config.json"
    draft.find(
        "note",
        "default_changed",
        "--generation-config",
        "sampling defaults come from the checkpoint's generation_config.json",
        why="the command line does not show that file; without it they are as written here",
        do="copy temperature, top_p, top_k and the rest from it to `sampling`",
    )
