"""What is computed: the plan, which Ansible, the Serve application and the rollout read.

    cluster.yml --(rayserve plan)--> plan.yml: Plan
                                      ├── replica      what one replica is; its hash is the revision
                                      ├── door         limits at the HTTP door, changed without a restart
                                      ├── scaling      how many replicas, and when
                                      ├── timeouts     limits in seconds
                                      ├── endpoint     where Serve listens
                                      ├── environment  what every Ray node must have in its environment
                                      ├── memory       the estimate that the verdict rests on
                                      ├── latency      how soon tokens come, as ranges
                                      ├── choices      what was chosen beyond engine arguments, and why
                                      ├── start        how long a start takes
                                      └── checkpoint   what its files hold, where they were read

A plan has no nulls and no free-key maps, because it crosses to Ansible, whose argument specs know
neither: what is absent is left out, and maps are lists of `{name, value}` records.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import Field

from rayserve.plan.estimates import LatencyEstimate, MemoryEstimate, StartEstimate
from rayserve.plan.record import NamedValue, Record

PLAN_KEY = "rayserve_plan"
PLAN_VERSION = 1


class Placement(Record):
    """The gang of GPUs that one replica holds."""

    tensor_parallel_size: int = Field(ge=1)
    pipeline_parallel_size: int = Field(ge=1)
    strategy: Literal["STRICT_PACK", "PACK"]
    """STRICT_PACK on one host; PACK over hosts, where the replica checks that no stage is split."""
    bundles: list[dict[str, float]]
    """Resources of each placement-group bundle; the replica actor lives in the first."""
    executor: Literal["mp", "ray"]
    """vLLM's distributed_executor_backend."""
    accelerator_type: str = ""
    """Ray's accelerator label that each bundle asks for, or empty for any."""

    @property
    def gpus(self) -> int:
        """GPUs that one replica holds."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class LoraAdapter(Record):
    """A LoRA adapter on local disk, loaded at start."""

    name: str
    path: str


class ReplicaPlan(Record):
    """Everything that defines one replica. Change any of it and the model restarts."""

    device: Literal["cuda", "cpu"]
    """cpu: vLLM's CPU engine on logical GPUs, for machines without one."""
    model: str
    """Local path or Hugging Face id."""
    model_source: Literal["path", "hub"] = "path"
    """What `model` is: an absolute folder on every host, or an id on the Hugging Face hub."""
    served_model_name: str
    vllm_version: str
    engine_args: list[NamedValue]
    """vLLM's own argument names, each already accepted by the pinned version."""
    frontend_args: list[NamedValue] = []
    """Arguments of vLLM's OpenAI server (chat template, tool and reasoning parser, …)."""
    lora_adapters: list[LoraAdapter] = []
    env: list[NamedValue] = []
    """Environment of the replica's processes (VLLM_*, NCCL_*, …)."""
    placement: Placement
    start_method: Literal["forkserver", "spawn"] = "forkserver"
    """How the engine's processes start on one host; across hosts they are Ray's."""
    start_timeout_s: float = Field(gt=0)
    """Start budget of one attempt: from the replica's constructor to ready; Serve makes three."""
    warmup_prompt_tokens: int = Field(ge=1)
    state_dir: str
    """Local folder for the start ledger."""
    content: list[NamedValue] = []
    """SHA-256 of small files that define the replica too (config.json, chat template, adapters'
    configs), by their path on the hosts; only of those that were at hand when the plan was made."""

    def definition(self) -> dict[str, Any]:
        """Plain data that defines the replica, without the reasons, which explain and do nothing."""
        whole = {"__all__": {"reason"}}
        reasons = {"engine_args": whole, "frontend_args": whole, "env": whole, "content": whole}
        return self.model_dump(mode="json", exclude_none=True, exclude=reasons)

    @property
    def revision(self) -> str:
        """Eight hex digits that name this replica definition."""
        text = json.dumps(self.definition(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def engine_arguments(self) -> dict[str, Any]:
        """Engine arguments as the keywords of vLLM's AsyncEngineArgs."""
        return {item.name: item.value for item in self.engine_args}

    def frontend_arguments(self) -> dict[str, Any]:
        """Frontend arguments as the attributes of vLLM's OpenAI server namespace."""
        return {item.name: item.value for item in self.frontend_args}


class DoorPlan(Record):
    """Limits at the HTTP door of a replica; changed without a restart."""

    admit: bool = True
    """False: new requests get 503 and Retry-After; running streams go on."""
    api_key_file: str = ""
    """File with one key a line, readable only by the service; empty: no keys (local profile only)."""
    max_in_flight: int = Field(ge=1)
    """Sequences that the engine may run at once; vLLM's max_num_seqs."""
    max_queued: int = Field(ge=0)
    """Sequences that may wait beyond max_in_flight; one more gets 429."""
    max_body_bytes: int = Field(ge=1)
    max_tokens: int = Field(ge=1)
    """Largest max_tokens of one request."""
    max_n: int = Field(ge=1)
    """Largest n and best_of of one request."""
    key_max_in_flight: int = Field(ge=0)
    """Sequences at once of one key; 0: no limit."""
    key_tokens_per_minute: int = Field(ge=0)
    """Prompt plus generated tokens a minute of one key on this replica; 0: no limit."""
    retry_after_s: int = Field(ge=1)

    @classmethod
    def closed(cls) -> DoorPlan:
        """A door that admits nobody: what a replica has until Serve hands it its limits."""
        return cls(
            admit=False,
            max_in_flight=1,
            max_queued=0,
            max_body_bytes=1,
            max_tokens=1,
            max_n=1,
            key_max_in_flight=0,
            key_tokens_per_minute=0,
            retry_after_s=1,
        )


class ScalingPlan(Record):
    """How many replicas, and when."""

    min_replicas: int = Field(ge=0)
    max_replicas: int = Field(ge=1)
    target_in_flight: int = Field(ge=1)
    """Requests a replica is meant to carry; above it another is asked for, if a gang is free."""
    target_kv_usage: float = Field(gt=0, le=1)
    upscale_delay_s: float = Field(ge=0)
    downscale_delay_s: float = Field(ge=0)
    ttft_slo_ms: float = Field(default=0, ge=0)
    """0: no objective."""
    tpot_slo_ms: float = Field(default=0, ge=0)


class LivePlan(Record):
    """What a replica takes while it runs: Serve's `user_config`."""

    door: DoorPlan
    scaling: ScalingPlan
    stall_s: float = Field(default=60.0, gt=0)
    """`timeouts.stall_s` of the plan. Serve stores these settings, and those of earlier versions have none."""

    def digest(self) -> str:
        """What a replica names these by, so that it can be told which it took: SHA-256, twelve hex digits."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]


class Timeouts(Record):
    """Limits in seconds."""

    drain_s: float = Field(gt=0)
    """Longest time a stopping replica may take to finish its streams."""
    stall_s: float = Field(gt=0)
    """Time without an engine step, while work is pending, after which a replica that does not
    answer its own probe either is given up."""
    health_check_period_s: float = Field(gt=0)
    health_check_timeout_s: float = Field(gt=0)


class Endpoint(Record):
    """Where Serve listens."""

    host: str
    port: int = Field(ge=1, le=65535)
    ingress: Literal["haproxy", "proxy"]
    """haproxy: Serve's HAProxy, which needs keys; proxy: Serve's own. Both bind `host`."""


class StoredBytes(Record):
    """Bytes of all tensors of one type in the checkpoint's files."""

    name: str
    """safetensors' name of the type, such as `BF16`."""
    value: int = Field(ge=0)


class NodePoolPlan(Record):
    """A pool of like hosts, as the hosts must be."""

    name: str
    hosts: int
    gpus_per_host: int
    gpu: str = ""
    """Key in data/gpus.yml; absent for CPU hosts."""


class Plan(Record):
    """The whole plan, as it stands under `rayserve_plan` in plan.yml."""

    plan_version: Literal[1]
    name: str
    profile: Literal["local", "production"]
    spec_sha256: str
    """SHA-256 of cluster.yml's bytes, which the preflight role compares."""
    revision: str
    """`replica.revision`; also the application's name and route in the generated Serve config."""
    node_pools: list[NodePoolPlan]
    replica: ReplicaPlan
    door: DoorPlan
    scaling: ScalingPlan
    timeouts: Timeouts
    endpoint: Endpoint
    environment: list[NamedValue]
    """What every Ray node needs in its environment before Ray starts (`rayserve env`)."""
    memory: MemoryEstimate | None = None
    """Absent for the CPU engine, which has no GPU memory to prove."""
    latency: LatencyEstimate | None = None
    """Absent where the architecture or the GPU is not known."""
    choices: list[NamedValue] = []
    """What the planner chose beyond engine arguments, each with its reason."""
    start: StartEstimate | None = None
    """Absent where neither the disk's bandwidth nor a real start is known."""
    checkpoint: list[StoredBytes] = []
    """What the checkpoint's files hold, by their headers; empty: they were not at hand. Where they are
    not, what an earlier plan of the same config.json says stays."""
    notes: list[str] = []
    """What the planner wants a person to know."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data without nulls, in the order of the fields."""
        return self.model_dump(mode="json", exclude_none=True)
