"""What may people write in cluster.yml? Every key, its unit, its default and its meaning.

Defaults stand here and nowhere else; `rayserve plan` writes them out in full. The text under each
field is its documentation and becomes docs/reference.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from rayserve.documents import Document, Loc, dotted
from rayserve.errors import Where
from rayserve.spec.base import (
    Auto,
    AutoCount,
    Count,
    ModelName,
    Name,
    OptionalPath,
    Seconds,
    Section,
    Text,
)
from rayserve.spec.checkpoint import Checkpoint, Model

SPEC_KEY = "rayserve_cluster"


class NodePool(Section):
    """A pool of like hosts."""

    name: Name
    """Name of the pool; also the Ansible group of its hosts."""
    hosts: Count
    """Number of hosts."""
    gpu: str = ""
    """GPU model, a key of data/gpus.yml such as `A100-80GB-SXM`; `cpu` for vLLM's CPU engine on
    logical GPUs; empty for hosts that serve no model."""
    gpus_per_host: int = Field(default=0, ge=0, le=64)
    """GPUs of each host; logical ones where `gpu: cpu`."""
    accelerator_type: str = ""
    """Ray's accelerator label to ask for, such as `A100`; empty: what Ray detects for `gpu`."""
    disk_gb_s: float = Field(default=0, ge=0, le=1000, allow_inf_nan=False)
    """Measured read bandwidth of the disk with the checkpoint, on each host, in 10^9 bytes a second:
    the plan predicts the start from it; 0: not known."""
    memory_gib: float = Field(default=0, ge=0)
    """Memory of each host, in GiB: the plan refuses more KV offload than it holds. 0: not known."""
    shm_gib: float = Field(default=0, ge=0)
    """Size of /dev/shm on each host, in GiB, which holds offloaded KV blocks and a queue between ranks.
    Linux makes it half of the memory, a container 64 MiB: 0.0625. 0: not known."""
    mig: bool = False
    """Whether the GPUs are in MIG mode, cut into slices, which the plan refuses."""


class Precision(Section):
    """Number formats."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Compute type; auto: the checkpoint's own."""
    quantization: str = "auto"
    """vLLM's name of the method, such as `compressed-tensors`; auto: what config.json says."""
    weight_bits: Literal["auto", 4, 8, 16, 32] = "auto"
    """Bits of a quantized weight, for how an architecture that the planner does not know is cut over
    ranks; auto: what config.json says."""
    kv_cache_dtype: str = "auto"
    """Type of the KV cache; auto: the compute type."""


class Workload(Section):
    """What a typical request is like: limits are chosen and latencies told for it, and a longer one is
    served all the same. The defaults are a chat's: the medians of Azure's conversations of 2023 were
    1020 and 129 tokens (Splitwise), and answers have grown since.
    """

    prompt_tokens: Count = 1024
    """Tokens before the answer, history and system prompt included."""
    output_tokens: Count = 256
    """Tokens of the answer."""


class Limits(Section):
    """What one replica holds at once."""

    max_model_len: AutoCount = "auto"
    """Longest prompt plus answer, in tokens."""
    max_num_seqs: AutoCount = "auto"
    """Requests that run at once; auto: by `aim`, and no more than the KV cache holds at the lengths of
    `workload`."""
    max_num_batched_tokens: AutoCount = "auto"
    """Tokens in one engine step: more shortens the first token, less steadies the others."""
    gpu_memory_utilization: float = Field(default=0.92, gt=0, le=0.98)
    """Share of each GPU's memory that vLLM may take."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | Auto = "auto"
    """KV cache of each GPU, in GiB; auto: what is left (GPU), or enough for the limits above (cpu)."""
    max_images: int = Field(default=0, ge=0)
    """Images in one request, for a model that takes them; 0: none."""


class Parallelism(Section):
    """How one replica is cut over GPUs."""

    tensor: AutoCount = "auto"
    """Ranks of a stage; auto: all GPUs of a host."""
    pipeline: AutoCount = "auto"
    """Stages; auto: one host is one stage, and as few hosts as hold the weights."""


class Scheduling(Section):
    """How the engine orders work."""

    chunked_prefill: bool = True
    """Cut long prompts, so that running answers do not stall."""
    prefix_caching: bool = True
    """Reuse the KV cache of a common beginning, such as a system prompt."""
    cuda_graphs: Literal["auto"] | bool = "auto"
    """Replay recorded GPU work: faster tokens, longer start. auto: on for GPUs, off for `cpu`."""
    start_method: Literal["forkserver", "spawn"] = "forkserver"
    """How the engine's processes start. forkserver: from one that has imported vLLM already, which
    takes a fraction of the time; spawn: each imports it anew, as vLLM does by itself inside Ray."""


class KvOffload(Section):
    """Where KV blocks go when the GPU is full. Unproven without a GPU: the CPU engine refuses it."""

    cpu_gib: float = Field(default=0, ge=0)
    """Host memory for KV blocks, in GiB, over all ranks of a replica; 0: off."""
    nvme_dir: OptionalPath = ""
    """Folder on a local disk for a second tier below `cpu_gib`; empty: off."""


class Sampling(Section):
    """Sampling where a request says nothing; what a client sends wins."""

    temperature: float = Field(default=0.7, ge=0, le=2)
    """0: always the likeliest token."""
    top_p: float = Field(default=0.9, gt=0, le=1)
    """Share of probability that is sampled from."""
    top_k: int = Field(default=40, ge=-1)
    """Number of tokens that are sampled from; -1 or 0: all."""
    min_p: float = Field(default=0, ge=0, le=1)
    """Least probability, relative to the likeliest token."""
    repetition_penalty: float = Field(default=1, gt=0, le=2)
    """1: none."""


class RopeScaling(Section):
    """Stretches the positions that the model was trained on. Scaling that a checkpoint was trained
    with (llama3, longrope) stands in its config.json and needs nothing here.
    """

    rope_type: Literal["linear", "dynamic", "yarn"]
    """Method."""
    factor: float = Field(gt=1, le=128)
    """Ratio of the new length to the trained one; published checkpoints go up to 40 (DeepSeek V3), so
    more than thrice that is a slip."""
    original_max_position_embeddings: Count
    """Length that the model was trained on, in tokens: at most that of its config.json."""


class Chat(Section):
    """How messages become a prompt, and answers become messages."""

    template_file: OptionalPath = ""
    """Jinja file on every host; empty: the tokenizer's own. Never inline: Ansible would expand it."""
    allowed_media_domains: list[Text] = []
    """Hosts that the engine may fetch images, sound and video from; empty: none at all."""
    tool_parser: str = ""
    """vLLM's parser of tool calls, such as `llama3_json`; empty: tools are off."""
    reasoning_parser: str = ""
    """vLLM's parser of reasoning text; empty: none."""


class Speculative(Section):
    """A cheap guess that the model checks."""

    method: Literal["ngram", "draft_model", "eagle", "eagle3", "mtp", "medusa", "suffix"]
    """Who guesses."""
    model: str = ""
    """Draft model: an absolute folder on every host or a Hugging Face id; not for ngram, suffix and
    mtp."""
    config: str = ""
    """config.json of the draft model, relative to cluster.yml; empty: fetched where `model` is an id,
    as that of `model.hf_id` is; of a folder, and of medusa, its memory is then not counted, and the
    plan says so."""
    revision: str = ""
    """Commit of the draft model, where `model` is an id; as `model.revision`."""
    num_tokens: int = Field(ge=1, le=32)
    """Tokens guessed at a time."""

    @property
    def from_hub(self) -> bool:
        """Whether the draft model is an id, and no folder."""
        return bool(self.model) and not self.model.startswith("/")


class Adapter(Section):
    """A LoRA adapter."""

    name: ModelName
    """The name that clients put in `model`."""
    path: Text
    """Folder on every host's local disk."""


class Lora(Section):
    """LoRA adapters, loaded at start; loading at run time is off."""

    adapters: list[Adapter] = []
    """The adapters."""
    max_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = 16
    """Largest rank among them."""


class Replicas(Section):
    """How many replicas of the model run."""

    min: int = Field(default=1, ge=1)
    """Always."""
    max: Count = 1
    """Under load, as far as whole gangs of GPUs are free."""
    pool: str = ""
    """Node pool that carries them; empty: the only pool with GPUs."""
    upscale_delay_s: Seconds = 30
    """Load must last this long before a replica is added."""
    downscale_delay_s: Seconds = 600
    """Calm must last this long before a replica is removed."""
    target_kv_usage: float = Field(default=0.8, gt=0, le=1)
    """Share of the KV cache in use above which another replica is asked for."""


class Slo(Section):
    """What users are promised; 0: nothing. What the GPUs cannot do at their peak rates is refused, and
    what is expected to be missed is a note.
    """

    ttft_ms: float = Field(default=0, ge=0)
    """Time to the first token, in ms, median. With `scheduling.prefix_caching` it is refused only below
    what a prompt needs that is cached as a whole: how many are, no plan knows. What one that is not
    cached cannot keep is a note."""
    tpot_ms: float = Field(default=0, ge=0)
    """Time per following token, in ms, median. With HAProxy it also sets how long a stream may run on
    after a reload, which stands in Ray's environment: after a change, Ray starts anew with
    `rayserve env`, and with it the model."""


class Endpoint(Section):
    """Where Serve listens. Only the gateway is meant for the public."""

    host: str = ""
    """Address that Serve binds on every node; empty: 127.0.0.1, which production must write out.
    HAProxy takes 127.0.0.1 on a single host and 0.0.0.0, and no other: replicas bind it too, and
    HAProxy reaches them by loopback on its own host and by address on others."""
    port: int = Field(default=8000, ge=1024, le=65535)
    """TCP port."""
    ingress: Literal["haproxy", "proxy"] = "haproxy"
    """haproxy: fast, needs keys; proxy: Serve's own."""
    api_key_file: OptionalPath = ""
    """File on every host with one API key a line, readable only by the service."""


class Door(Section):
    """Limits at the HTTP door. Changing them does not restart the model, but for `max_tokens`: the
    engine has it too, as the cap of requests that name no limit of their own.
    """

    max_queued: int = Field(default=64, ge=0)
    """Requests that wait beyond max_num_seqs; one more gets 429."""
    max_body_mib: float = Field(default=8, gt=0, le=1024)
    """Largest request body, in MiB."""
    max_tokens: AutoCount = "auto"
    """Largest `max_tokens` of a request, and the cap of one that names none; auto: max_model_len.
    A change restarts the model."""
    max_n: int = Field(default=4, ge=1, le=128)
    """Largest `n` and `best_of` of a request."""
    key_concurrency: int = Field(default=0, ge=0)
    """Requests at once of one key; 0: no limit."""
    key_tokens_per_minute: int = Field(default=0, ge=0)
    """Prompt plus generated tokens a minute of one key, each replica for itself; 0: no limit."""
    retry_after_s: Count = 5
    """What 429 and 503 answers tell the client to wait, in seconds."""


class Timeouts(Section):
    """Limits in seconds."""

    start_s: Seconds = 1800
    """Start budget of one attempt: from a replica's constructor to ready. Serve makes three attempts
    for each replica before it gives the deployment up, so a failure may take three times as long. A
    change restarts the model."""
    drain_s: Seconds = 600
    """Longest that a stopping replica may take to finish its streams. Where it is above the longest
    stream (`door.max_tokens` x `slo.tpot_ms`), HAProxy's limit follows it, which stands in Ray's
    environment: a running model takes the new drain limit, HAProxy its own when Ray starts anew."""
    stall_s: Seconds = 60
    """No engine step for this long while work is pending, and an own request of one token that does
    not come back either, is a hang: the replica is given up. Longer than the longest single step."""
    health_period_s: Seconds = 10
    """Time between health checks."""
    health_timeout_s: Seconds = 30
    """Longest that a health check may take."""


class ClusterSpec(Section):
    """One cluster that serves one model."""

    name: Name
    """Name of the cluster."""
    profile: Literal["local", "production"] = "production"
    """local: this machine; paths may be relative to cluster.yml, and Serve's own proxy needs no keys
    on 127.0.0.1. production: hosts made by Ansible; absolute paths, keys, Ray behind a token."""
    state_dir: Text = "/var/lib/rayserve"
    """Folder on every host for the records of starts and deaths of the engine, and the evidence of these."""
    node_pools: list[NodePool] = Field(min_length=1)
    """The hosts."""
    model: Model
    """The model."""
    aim: Literal["latency", "throughput"] = "latency"
    """What limits left `auto` are chosen for. latency: the time of each user's tokens; throughput:
    tokens of all users together, as far as `slo` allows."""
    workload: Workload = Workload()
    precision: Precision = Precision()
    limits: Limits = Limits()
    parallelism: Parallelism = Parallelism()
    scheduling: Scheduling = Scheduling()
    kv_offload: KvOffload = KvOffload()
    sampling: Sampling = Sampling()
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the engine; a request's own seed wins."""
    rope_scaling: RopeScaling | None = None
    chat: Chat = Chat()
    speculative: Speculative | None = None
    lora: Lora = Lora()
    replicas: Replicas = Replicas()
    slo: Slo = Slo()
    endpoint: Endpoint = Endpoint()
    door: Door = Door()
    timeouts: Timeouts = Timeouts()
    engine_args: dict[str, Any] = {}
    """Any other argument that the pinned vLLM accepts, by vLLM's own name."""
    env: dict[str, str | int | float | bool] = {}
    """Environment variables of the replica's processes, such as NCCL_* and VLLM_*."""

    _document: Document | None = PrivateAttr(default=None)
    _candidate: int | None = PrivateAttr(default=None)

    @classmethod
    def from_document(cls, document: Document) -> ClusterSpec:
        """The spec of a document, which remembers where each key stands.

        Raises:
            pydantic.ValidationError: a key is unknown, missing or of the wrong type.
        """
        spec = cls.model_validate(document.data[SPEC_KEY])
        spec._document = document  # noqa: SLF001  (its own private attribute)
        return spec

    def serving(self, index: int) -> ClusterSpec:
        """The same spec with candidate `index` as its model; messages point to the candidate's lines."""
        candidate = self.model.candidates[index]
        weights = {name: getattr(candidate, name) for name in Checkpoint.model_fields}
        model = self.model.model_copy(update={**weights, "candidates": []})
        spec = self.model_copy(update={"model": model})
        spec._candidate = index  # noqa: SLF001  (its own private attribute)
        return spec

    def where(self, *loc: str | int) -> Where:
        """The file and line of a key, for messages."""
        loc = self._written(loc)
        if self._document is None:
            return Where("cluster.yml", None, dotted((SPEC_KEY, *loc)))
        return self._document.where((SPEC_KEY, *loc))

    def _written(self, loc: Loc) -> Loc:
        """Where a key of the served checkpoint stands: under `model`, or in its candidate."""
        of_weights = loc[:1] == ("model",) and all(
            key in Checkpoint.model_fields for key in loc[1:2]
        )
        if self._candidate is None or not of_weights:
            return loc
        return ("model", "candidates", self._candidate, *loc[1:])
