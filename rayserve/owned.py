"""Which vLLM arguments and environment variables does the toolkit own, and what to write instead?

An argument is owned when setting it behind the toolkit's back would break a promise: the placement,
the door, the timers, or the safety of the host. Everything else may be set in `engine_args`/`env`.
"""

from __future__ import annotations

_PLACEMENT = "placement is computed; write `parallelism`"
_ONE_ENGINE = "one replica is one engine; write `replicas` for more of them"
_DOOR = "the door and Serve own the HTTP side; write `endpoint` or `door`"
_NO_SERVER = "no uvicorn of vLLM's runs here; Serve listens, see `endpoint`"
_UNSAFE = "leave it out: it runs code that comes with a checkpoint or a request"
_IN_SPEC = "write `{}`"
_IMPORTS = "leave it out: it names code that the engine would import"
_LOG_LEVEL = "the replica configures vLLM's log; write `env: {VLLM_LOGGING_LEVEL: …}`"

OWNED_ARGS: dict[str, str] = {
    # Where the engine runs.
    "tensor_parallel_size": "write `parallelism.tensor`",
    "pipeline_parallel_size": "write `parallelism.pipeline`",
    "distributed_executor_backend": _PLACEMENT,
    "nnodes": _PLACEMENT,
    "node_rank": _PLACEMENT,
    "master_addr": _PLACEMENT,
    "master_port": _PLACEMENT,
    "device_ids": _PLACEMENT,
    "prefill_context_parallel_size": _PLACEMENT,
    "worker_cls": _PLACEMENT,
    "worker_extension_cls": _UNSAFE,
    "scheduler_cls": _UNSAFE,
    "logits_processors": _UNSAFE,
    "model_class_overrides": _UNSAFE,
    "io_processor_plugin": _UNSAFE,
    "reasoning_parser_plugin": _UNSAFE,
    "tool_parser_plugin": _UNSAFE,
    "trust_remote_code": _UNSAFE + "; convert the checkpoint to an architecture that vLLM knows",
    "code_revision": _UNSAFE,
    "trust_request_chat_template": _UNSAFE,
    "trust_request_mm_kwargs": "leave it out: it lets a request change how much memory it takes",
    "enable_prompt_embeds": "leave it out: it loads tensors that come with a request",
    "enable_mm_embeds": "leave it out: it loads tensors that come with a request",
    "tool_server": "leave it out: it runs code that the model writes",
    "allowed_local_media_path": "leave it out: it lets a request read files of the host",
    "default_mm_loras": "write `lora`",
    "data_parallel_size": _ONE_ENGINE,
    "data_parallel_rank": _ONE_ENGINE,
    "data_parallel_start_rank": _ONE_ENGINE,
    "data_parallel_size_local": _ONE_ENGINE,
    "data_parallel_address": _ONE_ENGINE,
    "data_parallel_rpc_port": _ONE_ENGINE,
    "data_parallel_hybrid_lb": _ONE_ENGINE,
    "data_parallel_external_lb": _ONE_ENGINE,
    "data_parallel_multi_port_external_lb": _ONE_ENGINE,
    "data_parallel_backend": _ONE_ENGINE,
    "data_parallel_supervisor_port": _ONE_ENGINE,
    "dp_supervisor_probe_interval_s": _ONE_ENGINE,
    "dp_supervisor_probe_timeout_s": _ONE_ENGINE,
    "dp_supervisor_probe_failure_threshold": _ONE_ENGINE,
    "enable_elastic_ep": _ONE_ENGINE,
    "elastic_ep_max_dp_size": _ONE_ENGINE,
    # What it runs.
    "model": "write `model.path` or `model.hf_id`",
    "model_weights": "write `model.path`",
    "served_model_name": "write `model.served_name`",
    "revision": "write `model.revision`",
    "hf_config_path": "write `model.config`; the engine reads the checkpoint's own",
    "hf_token": "a token is a secret, and plan.yml is read by many: stage the weights on the hosts (`model.path`)",
    "hf_overrides": "write `rope_scaling`; other overrides belong in the checkpoint's config.json",
    "dtype": "write `precision.dtype`",
    "quantization": "write `precision.quantization`",
    "kv_cache_dtype": "write `precision.kv_cache_dtype`",
    "max_model_len": "write `limits.max_model_len`",
    "max_num_seqs": "write `limits.max_num_seqs`",
    "max_num_batched_tokens": "write `limits.max_num_batched_tokens`",
    "gpu_memory_utilization": "write `limits.gpu_memory_utilization`",
    "kv_cache_memory_bytes": "write `limits.kv_cache_gib`",
    "limit_mm_per_prompt": "write `limits.max_images`",
    "enable_chunked_prefill": "write `scheduling.chunked_prefill`",
    "enable_prefix_caching": "write `scheduling.prefix_caching`",
    "enforce_eager": "write `scheduling.cuda_graphs`",
    "kv_offloading_size": "write `kv_offload.cpu_gib`",
    "kv_offloading_backend": "write `kv_offload`",
    "kv_transfer_config": "write `kv_offload`",
    "kv_events_config": "leave it out: it publishes what is in the cache on an open port",
    "ec_transfer_config": "leave it out: it opens ports between engines, and there is one",
    "weight_transfer_config": "leave it out: it lets another process replace the weights",
    "seed": "write `seed`",
    "generation_config": "write `sampling`",
    "override_generation_config": "write `sampling`",
    "speculative_config": "write `speculative`",
    "spec_method": "write `speculative.method`",
    "spec_model": "write `speculative.model`",
    "spec_tokens": "write `speculative.num_tokens`",
    "reasoning_parser": "write `chat.reasoning_parser`",
    "tool_call_parser": "write `chat.tool_parser`",
    "enable_auto_tool_choice": "write `chat.tool_parser`; it turns tools on",
    "chat_template": "write `chat.template_file`",
    "enable_lora": "write `lora.adapters`; an adapter turns LoRA on",
    "max_lora_rank": "write `lora.max_rank`",
    "max_loras": "write `lora.adapters`; their number is counted",
    "lora_modules": "write `lora.adapters`",
    "allowed_media_domains": "write `chat.allowed_media_domains`",
    # Timers and queues.
    "shutdown_timeout": "write `timeouts.drain_s`",
    "max_num_queued_reqs": "write `door.max_queued`",
    "max_num_queued_tokens": "write `door.max_queued`",
    # What vLLM logs: the record of starts is read from it.
    "log_config_file": _LOG_LEVEL,
    "logging_config": _LOG_LEVEL,
    "log_level": _LOG_LEVEL,
    # Statistics feed the health checks and the autoscaling.
    "disable_log_stats": "leave it out: health checks and autoscaling read these statistics",
    # The HTTP side.
    "host": "write `endpoint.host`",
    "port": "write `endpoint.port`",
    "uds": _NO_SERVER,
    "grpc_port": _NO_SERVER,
    "api_key": "write `endpoint.api_key_file`, the path of a file with one key a line",
    "root_path": _DOOR,
    "middleware": _DOOR,
    "allow_credentials": _DOOR,
    "allowed_origins": _DOOR,
    "allowed_methods": _DOOR,
    "allowed_headers": _DOOR,
    "ssl_keyfile": "TLS ends at the gateway",
    "ssl_certfile": "TLS ends at the gateway",
    "ssl_ca_certs": "TLS ends at the gateway",
    "ssl_cert_reqs": "TLS ends at the gateway",
    "ssl_ciphers": "TLS ends at the gateway",
    "enable_ssl_refresh": "TLS ends at the gateway",
    "uvicorn_log_level": _NO_SERVER,
    "disable_uvicorn_access_log": _NO_SERVER,
    "disable_access_log_for_endpoints": _NO_SERVER,
    "h11_max_incomplete_event_size": _NO_SERVER,
    "h11_max_header_count": _NO_SERVER,
    "enable_offline_docs": _DOOR,
    "disable_fastapi_docs": _DOOR,
    "enable_tokenizer_info_endpoint": "leave it out: the door does not open that path",
    "enable_scale_out": "leave it out: the door does not open those paths",
    "tokens_only": "leave it out: it removes the OpenAI API",
    "enable_server_load_tracking": "the door counts requests in flight; see /metrics",
}

REMOVED_ARGS: dict[str, str] = {
    "swap_space": "vLLM removed it in 0.18; write `kv_offload.cpu_gib`",
    "disable_log_requests": "vLLM removed it in 0.17; requests are not logged by default",
    "enable_flash_attn": "no such argument ever was; vLLM chooses, or write `attention_backend`",
    "num_scheduler_steps": "vLLM removed it in 0.10.1; leave it out",
    "max_seq_len_to_capture": "vLLM removed it; write `cudagraph_capture_sizes`",
    "cuda_graph_sizes": "vLLM removed it; write `cudagraph_capture_sizes`",
    "speculative_model": "vLLM removed it; write `speculative`",
    "guided_decoding_backend": "vLLM removed it; write `structured_outputs_config`",
    "preemption_mode": "vLLM removed it; leave it out",
    "use_v2_block_manager": "vLLM removed it; leave it out",
    "disable_frontend_multiprocessing": "vLLM removed it; leave it out",
    "max_num_partial_prefills": "vLLM removed it in 0.27; leave it out",
    "max_long_partial_prefills": "vLLM removed it in 0.27; leave it out",
    "calculate_kv_scales": "vLLM removed it in 0.28; leave it out",
    "enable_bf16x3_router_gemm": "vLLM removed it; leave it out",
}
"""Arguments of earlier versions that still stand in many notes."""

_TIMER = "Serve's timers come from `timeouts` and `rayserve env`, the same on every node"
_SECRET = (
    "a secret, and plan.yml is read by many: stage on the hosts what needs it, such as the weights"
)

CODE_ENV = (
    "LD_PRELOAD",
    "LD_AUDIT",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONUSERBASE",
    "PYTHONPLATLIBDIR",
    "PYTHONSTARTUP",
    "PYTHONBREAKPOINT",
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
    "GCONV_PATH",
    "VLLM_CUDART_SO_PATH",
)
"""Variables by which the loader, Python, CUDA, glibc or vLLM take in code that the plan does not name.
Not LD_LIBRARY_PATH: drivers and libraries of CUDA outside the usual folders are found by it. Nor
VLLM_NCCL_SO_PATH, NCCL_NET_PLUGIN and NCCL_TUNER_PLUGIN: hosts and networks need an NCCL and plugins of
their own, and these name them."""

OWNED_ENV: dict[str, str] = {
    "VLLM_API_KEY": "write `endpoint.api_key_file`; vLLM's own check leaves paths open",
    "VLLM_SERVER_DEV_MODE": "leave it out: it opens paths that stop or rewrite the engine",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "leave it out: it lets a request load files; write `lora`",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "leave it out: it unpickles what comes over a socket",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "leave it out: beyond the trained length answers turn to noise; "
    "write `rope_scaling`",
    "VLLM_ENGINE_READY_TIMEOUT_S": "write `timeouts.start_s`",
    "VLLM_LOGGING_CONFIG_PATH": "the replica sets it; write `VLLM_LOGGING_LEVEL`",
    "VLLM_CPU_KVCACHE_SPACE": "write `limits.kv_cache_gib`",
    "VLLM_NO_USAGE_STATS": "usage reporting is off and stays off",
    "VLLM_DO_NOT_TRACK": "usage reporting is off and stays off",
    "DO_NOT_TRACK": "usage reporting is off and stays off",
    "VLLM_USAGE_STATS_SERVER": "usage reporting is off and stays off",
    "RAY_USAGE_STATS_ENABLED": "usage reporting is off and stays off",
    "RAY_worker_niceness": "it is read where Ray starts: see `rayserve env`",
    "HF_HUB_DISABLE_TELEMETRY": "usage reporting is off and stays off",
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "leave it out: a redirect leaves chat.allowed_media_domains",
    "VLLM_LORA_RESOLVER_CACHE_DIR": "leave it out: it lets a request load files; write `lora`",
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": "leave it out: it lets a request load files; write `lora`",
    "VLLM_RAY_PER_WORKER_GPUS": _PLACEMENT,
    "VLLM_RAY_BUNDLE_INDICES": _PLACEMENT,
    "VLLM_PORT": "ports are computed for each replica",
    "VLLM_HOST_IP": "addresses are found on each host",
    "VLLM_DP_SIZE": _ONE_ENGINE,
    "VLLM_DP_RANK": _ONE_ENGINE,
    "VLLM_WORKER_MULTIPROC_METHOD": "write `scheduling.start_method`",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "the engine runs in a process of its own",
    "CUDA_VISIBLE_DEVICES": "Ray sets it for each replica",
    "HF_HUB_OFFLINE": "set by the plan: on for `model.path`, off for `model.hf_id`",
    **dict.fromkeys(CODE_ENV, "leave it out: it loads code into the engine"),
    "PATH": "the service's own; roles set it",
    "HOME": "the service's own; roles set it",
}

REMOVED_ENV: dict[str, str] = {
    "VLLM_USE_V1": "leave it out; the V1 engine is the only one",
    "VLLM_ATTENTION_BACKEND": "write `attention_backend` under engine_args",
    "VLLM_FLASH_ATTN_VERSION": "write `attention_config: {flash_attn_version: …}` under engine_args",
    "VLLM_USE_TRTLLM_ATTENTION": "write `attention_config: {use_trtllm_attention: …}` under engine_args",
    "VLLM_USE_TRITON_FLASH_ATTN": "write `attention_backend: TRITON_ATTN` under engine_args where it is meant",
    "VLLM_ALL2ALL_BACKEND": "write `all2all_backend` under engine_args",
    "VLLM_TORCH_PROFILER_DIR": "leave it out; `profiler_config` takes its place",
}
"""Variables of earlier versions, which vLLM ignores now (data/vllm-flags.yml has when they went)."""

OWNED_KEYS: dict[str, str] = {
    "compilation_config.backend": _IMPORTS,
    "compilation_config.inductor_passes": _IMPORTS,
    "ec_manager_config.encoder_cache_manager_cls": _IMPORTS,
    "default_chat_template_kwargs.chat_template": "write `chat.template_file`",
}
"""Keys inside mapping arguments that are owned under their whole name alone."""

REMOVED_KEYS: dict[str, str] = {
    "compilation_config.level": "write `mode`",
    "compilation_config.full_cuda_graph": "write `cudagraph_mode: FULL`",
    "compilation_config.use_cudagraph": "write `cudagraph_mode`",
    "compilation_config.use_inductor": "leave it out: vLLM chooses",
    "compilation_config.max_capture_size": "write `max_cudagraph_capture_size`",
    "compilation_config.pass_config.enable_noop": "write `eliminate_noops`",
    "compilation_config.pass_config.enable_fusion": "write `fuse_norm_quant` and `fuse_act_quant`",
    "compilation_config.pass_config.enable_attn_fusion": "write `fuse_attn_quant`",
    "compilation_config.pass_config.enable_fi_allreduce_fusion": "write `fuse_allreduce_rms`",
}
"""Keys inside mapping arguments that earlier versions had (vllm/config/compilation.py, vllm#29646)."""

_FREE_KEYS: dict[str, frozenset[str] | None] = {
    "quantization_config": frozenset({"dtype"}),  # of a scale or a weight, not the model's
    "default_chat_template_kwargs": None,  # the template's own variables
}
"""Keys that mean something else inside a mapping than the argument of that name; None: all of them."""

SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "CREDENTIAL")
NOT_SECRETS = ("TOKENIZERS_PARALLELISM",)


def argument_owner(name: str) -> str:
    """What to write instead of vLLM's argument of a name; empty: the toolkit does not own it."""
    plain = name.lstrip("-").replace("-", "_")
    return OWNED_ARGS.get(plain, "") or REMOVED_ARGS.get(plain, "")


def env_owner(name: str) -> str:
    """Why an environment variable may not be set, and what to write instead; empty: it may."""
    if name in OWNED_ENV:
        return OWNED_ENV[name]
    if name.startswith("RAY_SERVE_"):
        return _TIMER
    if name.startswith("RAY_"):
        return "Ray's own settings belong to its service on each host, not to a replica"
    known = name.startswith("VLLM_") or name in NOT_SECRETS
    upper = name.upper()
    if not known and (upper.endswith("_KEY") or any(word in upper for word in SECRET_WORDS)):
        return _SECRET
    return ""


def key_owner(argument: str, keys: tuple[str, ...]) -> str:
    """Why a key inside a mapping argument may not be set, and what to write; empty: it may.

    vLLM reads some owned arguments from such a mapping too, as the reasoning parser from
    `structured_outputs_config`: what is refused by itself is refused there.
    """
    key = keys[-1].replace("-", "_")
    if owner := OWNED_KEYS.get(".".join((argument, *keys))):
        return owner
    if any(word in key.upper() for word in SECRET_WORDS if word != "TOKEN"):
        return _SECRET
    free = _FREE_KEYS.get(argument, frozenset())
    return "" if free is None or key in free else OWNED_ARGS.get(key, "")
