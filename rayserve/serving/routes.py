"""Which request of the engine's HTTP app may pass the door, and as what.

    open    no key: liveness and readiness
    keyed   needs a key; `json_body` routes reach the tokenizer or the engine, so they are
            counted, their bodies are capped and parsed, and they are refused while draining
    DENIED  known to the engine's app and closed on purpose, each with its reason

A path that stands in neither table is closed as well. Matching is exact, on the path as the server
decoded it: nothing is normalised, so `//v1/models`, `/V1/Models` and `/v1/models/` are just unknown
paths, and the door can never read a path otherwise than the router behind it does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Shape = Literal["openai", "anthropic"]


@dataclass(frozen=True, slots=True)
class Route:
    """How the door treats one method of one path."""

    access: Literal["open", "keyed"] = "keyed"
    json_body: bool = False
    """A POST with a JSON body that costs tokenizer or engine time: counted and limited."""
    gated: bool = True
    """Refused with 503 while the replica is not ready."""
    prompts: tuple[str, ...] = ()
    """Body fields that may hold a list of prompts, each of which becomes a sequence."""


Methods = Mapping[str, Route]

_GENERATE: Final = Route(json_body=True)
_INFO: Final = Route(gated=False)


def _post(*prompts: str) -> Methods:
    return {"POST": Route(json_body=True, prompts=prompts)}


READY_PATH: Final = "/ready"
"""The only path that the door answers itself."""

ALLOWED: Final[Mapping[str, Methods]] = {
    "/health": {"GET": Route(access="open", gated=False)},
    READY_PATH: {"GET": Route(access="open", gated=False)},
    "/metrics": {"GET": _INFO},
    "/version": {"GET": _INFO},
    "/v1/models": {"GET": Route()},
    "/v1/chat/completions": {"POST": _GENERATE},
    "/v1/completions": _post("prompt", "prompt_embeds"),
    "/v1/responses": {"POST": _GENERATE},
    "/v1/messages": {"POST": _GENERATE},
    "/v1/messages/count_tokens": {"POST": _GENERATE},
    "/tokenize": {"POST": _GENERATE},
    "/detokenize": {"POST": _GENERATE},
    "/v1/embeddings": _post("input", "messages"),
    "/pooling": _post("input", "messages", "data"),
    "/classify": _post("input", "messages"),
    "/score": _post("text_1", "text_2", "data_1", "data_2", "queries", "documents", "items"),
    "/rerank": _post("documents"),
    "/v1/rerank": _post("documents"),
}

_RESPONSE_ID: Final = r"/v1/responses/[A-Za-z0-9_-]{1,128}"

# Path parameters. The template is the router's own spelling, for the contract test.
PATTERNS: Final[tuple[tuple[str, re.Pattern[str], Methods], ...]] = (
    ("/v1/responses/{response_id}", re.compile(_RESPONSE_ID), {"GET": _INFO}),
    ("/v1/responses/{response_id}/cancel", re.compile(_RESPONSE_ID + "/cancel"), {"POST": _INFO}),
)

_DOCS: Final = "describes routes that this door does not serve"
_SCALE_OUT: Final = "internal protocol between split prefill and decode servers"
_RENDER: Final = "template debugging, not inference"
_SAGEMAKER: Final = "a second, unchecked way into the same handlers"
_AUDIO: Final = "multipart uploads, which the body checks do not read"
_DEV: Final = "development mode: changes or reveals the state of the engine"
_RL: Final = "training mode: replaces weights or halts the engine"
_DUPLICATE: Final = "a second spelling of an allowed path"

DENIED: Final[Mapping[str, str]] = {
    "/docs": _DOCS,
    "/docs/oauth2-redirect": _DOCS,
    "/redoc": _DOCS,
    "/openapi.json": _DOCS,
    "/ping": "a second spelling of /health",
    "/invocations": _SAGEMAKER,
    "/load": "the door counts requests itself",
    "/kv_event_sources": "addresses inside the cluster",
    "/tokenizer_info": "the whole tokenizer configuration, chat template included",
    "/v1/load_lora_adapter": "adapters belong to the revision; loading one at run time breaks that",
    "/v1/unload_lora_adapter": "adapters belong to the revision",
    "/adapters": "adapters belong to the revision",
    "/adapters/{adapter_name}": "adapters belong to the revision",
    "/start_profile": "slows the engine for everybody",
    "/stop_profile": "slows the engine for everybody",
    "/scale_elastic_ep": "the number of ranks belongs to the plan",
    "/is_scaling_elastic_ep": "the number of ranks belongs to the plan",
    "/fault_tolerance/apply": _DEV,
    "/fault_tolerance/status": _DEV,
    "/inference/v1/generate": _SCALE_OUT,
    "/inference/v1/abort_requests": "aborts requests of other clients",
    "/abort_requests": "aborts requests of other clients",
    "/v1/chat/completions/batch": "many prompts behind one request; send them one by one",
    "/v1/chat/completions/render": _RENDER,
    "/v1/chat/completions/derender": _RENDER,
    "/v1/completions/render": _RENDER,
    "/v1/completions/derender": _RENDER,
    "/v1/messages/render": _RENDER,
    "/v1/responses/render": _RENDER,
    "/v1/systemone": "structured decisions: no client of this service speaks it",
    "/generative_scoring": "many sequences behind one request, uncounted",
    "/cohere/v2/chat": "no client of this service speaks it",
    "/v1/audio/transcriptions": _AUDIO,
    "/v1/audio/translations": _AUDIO,
    "/v1/realtime": "a WebSocket, which the door closes",
    "/v2/embed": "no client of this service speaks it",
    "/v1/score": _DUPLICATE,
    "/v2/rerank": _DUPLICATE,
    "/server_info": _DEV,
    "/reset_prefix_cache": _DEV,
    "/reset_mm_cache": _DEV,
    "/reset_encoder_cache": _DEV,
    "/collective_rpc": _DEV,
    "/sleep": _DEV,
    "/wake_up": _DEV,
    "/release_kv_cache_memory": _DEV,
    "/is_sleeping": _DEV,
    "/pause": _RL,
    "/resume": _RL,
    "/is_paused": _RL,
    "/init_weight_transfer_engine": _RL,
    "/shutdown_weight_transfer_engine": _RL,
    "/start_weight_update": _RL,
    "/start_draft_weight_update": _RL,
    "/update_weights": _RL,
    "/finish_weight_update": _RL,
    "/update_weight_version": _RL,
    "/weight_info": _RL,
    "/weight_checker": _RL,
    "/get_world_size": _RL,
}


def find(path: str) -> Methods | None:
    """The methods allowed on a path relative to the app's root, or None where it is closed."""
    methods = ALLOWED.get(path)
    if methods is not None:
        return methods
    # /v1/responses/render would match the pattern of a response id, as it does in the router.
    if path in DENIED:
        return None
    for _, pattern, allowed in PATTERNS:
        if pattern.fullmatch(path):
            return allowed
    return None


def shape_of(path: str) -> Shape:
    """The dialect of error bodies that clients of a path understand."""
    return "anthropic" if path.startswith("/v1/messages") else "openai"


def locate(scope: Mapping[str, Any], prefix: str) -> tuple[str, str] | None:
    """Mount point and path below it, or None where the request is outside of the mount point.

    Ray Serve leaves the route prefix in `path` and repeats it in `root_path`; `prefix` is one
    that the server in front did not put into `root_path`.
    """
    path: str = scope["path"]
    mount: str = scope.get("root_path", "").rstrip("/")
    if not (mount and (path == mount or path.startswith(mount + "/"))):
        mount = ""
    if prefix and not mount.endswith(prefix):
        mount += prefix
        if not (path == mount or path.startswith(mount + "/")):
            return None
    return mount, path[len(mount) :]
