"""How vLLM comes up inside a replica: arguments, engine, its own OpenAI app, and a real warm-up.

Importing this module imports vLLM, which takes seconds: a replica does it as its first phase.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from rayserve.plan import ReplicaPlan
from rayserve.serving.door import current_account
from rayserve.serving.keys import Account
from rayserve.serving.load import EngineLoad

MEMORY_REPORT = "rayserve.serving.ledger.MemoryReport"
WARMUP_TOKENS = 8


class MeteredEngine(AsyncLLM):
    """vLLM's engine, which charges tokens to the account of the request in whose context it runs."""

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **rest: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As vLLM's own, in whose place the OpenAI app calls it."""
        stream = super().generate(prompt, sampling_params, request_id, **rest)
        account = current_account.get()
        return stream if account is None else _metered(stream, account, sampling_params)


async def _metered(
    stream: AsyncGenerator[RequestOutput, None], account: Account, params: SamplingParams
) -> AsyncGenerator[RequestOutput, None]:
    delta = params.output_kind == RequestOutputKind.DELTA
    prompt_charged = False
    # aclosing: when the client leaves, vLLM must see GeneratorExit at once, to abort the request.
    async with aclosing(stream):
        async for output in stream:
            if not prompt_charged:
                prompt_charged = True
                account.charge(len(output.prompt_token_ids or ()))
            if delta or output.finished:
                account.charge(sum(len(choice.token_ids) for choice in output.outputs))
            yield output


def engine_namespace(replica: ReplicaPlan) -> Namespace:
    """The arguments as vLLM's own OpenAI server would hold them, defaults included.

    Raises:
        ValueError, TypeError: vLLM's own checks of the frontend arguments.
    """
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args.model = replica.model
    args.served_model_name = [replica.served_model_name]
    args.tensor_parallel_size = replica.placement.tensor_parallel_size
    args.pipeline_parallel_size = replica.placement.pipeline_parallel_size
    args.distributed_executor_backend = replica.placement.executor
    args.worker_extension_cls = MEMORY_REPORT
    args.disable_fastapi_docs = True
    args.disable_uvicorn_access_log = True
    if replica.lora_adapters:
        args.enable_lora = True
        args.lora_modules = [
            LoRAModulePath(name=adapter.name, path=adapter.path)
            for adapter in replica.lora_adapters
        ]
    for name, value in {**replica.engine_arguments(), **replica.frontend_arguments()}.items():
        if not hasattr(args, name):
            raise ValueError(f"vLLM {replica.vllm_version} has no argument {name!r}")
        setattr(args, name, value)
    validate_parsed_serve_args(args)
    return args


def engine_config(args: Namespace) -> VllmConfig:
    """vLLM's whole configuration; every rule that needs no accelerator is checked here."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    return engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def start_engine(config: VllmConfig, load: EngineLoad) -> MeteredEngine:
    """Start the engine's processes, load weights, profile memory. Blocks until it is up.

    Raises:
        RuntimeError: a process of the engine failed; its log has the cause.
    """

    class LoadRecorder(StatLoggerBase):
        """Copies the statistics of each step into `load`."""

        def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
            """Nothing to keep: there is one engine a replica."""

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: MultiModalCacheStats | None = None,  # noqa: ARG002 - vLLM's signature
            engine_idx: int = 0,  # noqa: ARG002 - vLLM's signature
        ) -> None:
            now_s = time.monotonic()
            if scheduler_stats is not None:
                load.step(
                    now_s,
                    scheduler_stats.num_running_reqs,
                    scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                    scheduler_stats.kv_cache_usage,
                )
            if iteration_stats is not None:
                for ttft_s in iteration_stats.time_to_first_tokens_iter:
                    load.first_token(now_s, ttft_s)

        def log_engine_initialized(self) -> None:
            """Nothing to say: the replica's own ledger records the start."""

    engine = MeteredEngine.from_vllm_config(
        config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        stat_loggers=[LoadRecorder],
    )
    assert isinstance(engine, MeteredEngine)
    return engine


async def build_openai_app(engine: AsyncLLM, args: Namespace) -> FastAPI:
    """vLLM's own OpenAI app on this engine, whole."""
    await engine.reset_mm_cache()
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    return app


async def warm_up(engine: AsyncLLM, prompt_tokens: int) -> None:
    """One real prefill and a short decode, so that no user pays for first-time work.

    It also keeps clear of a crash of vLLM's CPU attention when its very first prompt is one token.
    Models that do not generate have no decode to warm up.
    """
    if "generate" not in await engine.get_supported_tasks():
        return
    length = max(1, min(prompt_tokens, engine.model_config.max_model_len - WARMUP_TOKENS))
    vocabulary = engine.model_config.get_vocab_size()
    tokens = [(7 + 13 * place) % vocabulary for place in range(length)]
    parsed = parse_model_prompt(engine.model_config, {"prompt_token_ids": tokens})
    renderer = engine.renderer
    (prompt,) = renderer.render_cmpl([parsed], renderer.default_cmpl_tok_params)
    params = SamplingParams(max_tokens=WARMUP_TOKENS, temperature=0.0, ignore_eos=True)
    async for _ in engine.generate(prompt, params, f"warm-up-{time.monotonic_ns()}"):
        pass


def engine_facts(config: VllmConfig) -> dict[str, Any]:
    """What the planner calibrates on, beside the workers' memory."""
    cache, model, scheduler = config.cache_config, config.model_config, config.scheduler_config
    return {
        "block_size": cache.block_size,
        "num_gpu_blocks": cache.num_gpu_blocks,
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "dtype": str(model.dtype).removeprefix("torch."),
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "pipeline_parallel_size": config.parallel_config.pipeline_parallel_size,
    }
