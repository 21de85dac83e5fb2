"""How vLLM comes up inside a replica: arguments, engine, its own OpenAI app, and a real warm-up.

Importing this module imports vLLM, which takes seconds: a replica does it as its first phase.
"""

from __future__ import annotations

import asyncio
import json
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NoReturn

from fastapi import FastAPI
from vllm import PoolingParams, SamplingParams
from vllm import __version__ as vllm_version
from vllm import logger as vllm_logger
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind
from vllm.tasks import POOLING_TASKS
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from rayserve.errors import EngineArgumentError
from rayserve.plan import ReplicaPlan
from rayserve.serving.door import current_account
from rayserve.serving.keys import Account
from rayserve.serving.load import EngineLoad

MEMORY_REPORT = "rayserve.serving.ledger.MemoryReport"
WARMUP_TOKENS = 8


_begun_states: ContextVar[list[RequestState]] = ContextVar("begun_states")
"""Takes the states of the request that a metered stream is about to add."""

# vLLM ends such a request with the finish reason `error`. It ends others so too, for which this would
# be the wrong answer: where a connector lost a KV cache, and where the cached output of an encoder is
# lost or is another's. `MeteredEngine.generate` says it only where neither can be.
_NO_ANSWER = (
    "The schema, regular expression or grammar of this request cannot be followed: it allows no "
    "(further) token, or it does not compile."
)
_NO_MESSAGE = (
    "A value of this request has no form in the engine: an integer of more than 64 bits, or half of a "
    "surrogate pair in a text."
)


class MeteredEngine(AsyncLLM):
    """vLLM's engine, which charges tokens to the account of the request in whose context it runs.

    The prompt is charged when the engine takes it, and what was generated also when the client has
    left: hanging up costs what it used.
    """

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **rest: Any
    ) -> RequestOutputCollector:
        """As vLLM's own; the prompt is charged.

        Raises:
            VLLMValidationError: no message to the engine's process can hold a value of the request.
        """
        try:
            collector = await super().add_request(request_id, prompt, params, *args, **rest)
        except (OverflowError, UnicodeEncodeError) as error:
            raise VLLMValidationError(_NO_MESSAGE) from error
        account = current_account.get()
        if account is not None:
            output = self.output_processor
            # get: to look a missing id up in vLLM's defaultdict would leave an entry behind.
            ids = output.external_req_ids.get(request_id, ())
            known = (output.request_states.get(i) for i in ids)
            # Clients choose the id (X-Request-Id), so two may share one; a collector has one request.
            states = [state for state in known if state is not None and state.queue is collector]
            _begun_states.get([]).extend(states)
            account.charge(max((state.prompt_len for state in states), default=0))
        return collector

    async def _add_request(self, request: EngineCoreRequest, *args: Any) -> None:
        """As vLLM's own, which notes the request first and would keep one that cannot be sent."""
        try:
            await super()._add_request(request, *args)
        except (OverflowError, UnicodeEncodeError):
            self.output_processor.abort_requests([request.request_id], internal=True)
            raise

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **rest: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As vLLM's own, in whose place the OpenAI app calls it."""
        stream = super().generate(prompt, sampling_params, request_id, **rest)
        delta = sampling_params.output_kind == RequestOutputKind.DELTA
        guided = (
            sampling_params.structured_outputs is not None
            and self.vllm_config.kv_transfer_config is None
            and not (isinstance(prompt, dict) and prompt.get("type") != "token")
        )
        return _charged(stream, delta=delta, guided=guided)

    def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, *args: Any, **rest: Any
    ) -> AsyncGenerator[Any, None]:
        """As vLLM's own, for embeddings, scores and the like: only the prompt costs."""
        stream = super().encode(prompt, pooling_params, request_id, *args, **rest)
        return _charged(stream, delta=False)


def _charged(
    stream: AsyncGenerator[Any, None], *, delta: bool, guided: bool = False
) -> AsyncGenerator[Any, None]:
    account = current_account.get()
    if account is None:
        return stream
    return _metered(stream, account, delta=delta, guided=guided)


async def _metered(
    stream: AsyncGenerator[Any, None], account: Account, *, delta: bool, guided: bool
) -> AsyncGenerator[Any, None]:
    charged = 0
    states: list[RequestState] = []
    _begun_states.set(states)  # the stream's first step, in this context, adds the request
    try:
        # aclosing: when the client leaves, vLLM must see it at once, to abort the request.
        async with aclosing(stream):
            async for output in stream:
                if delta:
                    new = sum(len(choice.token_ids) for choice in output.outputs)
                    charged += new
                    account.charge(new)
                if guided and any(choice.finish_reason == "error" for choice in output.outputs):
                    raise VLLMValidationError(_NO_ANSWER)
                yield output
    finally:
        made = sum(_generated(state) for state in states)
        if made > charged:
            account.charge(made - charged)


def _generated(state: RequestState) -> int:
    """Tokens that the engine has made for this sequence so far; none for a pooling request."""
    return 0 if state.detokenizer is None else int(state.detokenizer.num_output_tokens())


class _ArgumentParser(FlexibleArgumentParser):
    """vLLM's own, which raises where that one ends the process: here it is a replica's."""

    def error(self, message: str) -> NoReturn:
        """Take argparse's `argument --attention-config/-ac: REASON`.

        Raises:
            ValueError: always, with the reason.
        """
        raise ValueError(message.partition(": ")[2] or message)


def engine_namespace(replica: ReplicaPlan) -> Namespace:
    """The arguments as vLLM's own OpenAI server would hold them, defaults included.

    Raises:
        EngineArgumentError: vLLM does not take a mapping, for a key or a value in it.
        ValueError, TypeError: vLLM's own checks of the frontend arguments.
    """
    parser = make_arg_parser(_ArgumentParser())
    args: Namespace = parser.parse_args([])
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
        if isinstance(value, dict):
            setattr(args, name, _mapping(parser, name, value))
        else:
            setattr(args, name, value)
    validate_parsed_serve_args(args)
    return args


def _mapping(parser: FlexibleArgumentParser, name: str, value: dict[str, Any]) -> Any:
    """A mapping through vLLM's own command line, which makes configuration objects of some."""
    try:
        return getattr(parser.parse_args(["--" + name.replace("_", "-"), json.dumps(value)]), name)
    # Its validators look names up in enumerations, too.
    except (ValueError, TypeError, LookupError) as error:
        raise EngineArgumentError(
            f"`{name}` as vLLM {vllm_version} takes it",
            found=" ".join(str(error).partition("For further information")[0].split())[:500],
            do=f"correct `engine_args.{name}` in the spec and plan again",
        ) from None


def keep_logging(args: Namespace) -> None:
    """Keep vLLM from configuring the logging of this process; the engine's own processes do.

    It would use `dictConfig`, which closes every handler: Serve's own log of a replica would end there.
    """
    applied = AsyncEngineArgs.from_cli_args(args).create_logging_config()
    vllm_logger._last_configured_logging_config = applied  # noqa: SLF001


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
    # vLLM's error handler tells its own HTTP server to end once the engine is dead. Here Serve
    # replaces the replica, whose `check_health` fails then.
    app.state.server = SimpleNamespace(should_exit=False)
    return app


async def warm_up(engine: AsyncLLM, prompt_tokens: int) -> None:
    """One real prefill and a short decode, so that no user pays for first-time work.

    It also keeps clear of a crash of vLLM's CPU attention when its very first prompt is one token.
    """
    length = max(1, min(prompt_tokens, engine.model_config.max_model_len - WARMUP_TOKENS))
    await ask(engine, length, WARMUP_TOKENS, f"warm-up-{time.monotonic_ns()}")


async def ask(engine: AsyncLLM, prompt_tokens: int, tokens: int, name: str) -> None:
    """Have the engine prefill a prompt and generate so many tokens, in a request of this name.

    A model that does not generate does what it does instead.
    """
    tasks = await engine.get_supported_tasks()
    vocabulary = engine.model_config.get_vocab_size()
    ids = [(7 + 13 * place) % vocabulary for place in range(prompt_tokens)]
    parsed = parse_model_prompt(engine.model_config, {"prompt_token_ids": ids})
    renderer = engine.renderer
    (prompt,) = renderer.render_cmpl([parsed], renderer.default_cmpl_tok_params)
    if "generate" in tasks:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        async for _ in engine.generate(prompt, params, name):
            pass
    elif pooling := [task for task in tasks if task in POOLING_TASKS]:
        async for _ in engine.encode(prompt, PoolingParams(task=pooling[0]), name):
            pass


async def warm_up_chat(app: FastAPI, model: str) -> None:
    """One chat request through the app: the first one compiles the template and loads parsers.

    Whatever the answer is; a model without a chat template refuses it.
    """
    chat = {
        "model": model,
        "messages": [{"role": "user", "content": "Are you there?"}],
        "max_tokens": 2,
        "stream": True,
    }
    messages = iter([{"type": "http.request", "body": json.dumps(chat).encode()}])
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"host", b"warm-up")],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        if message is None:
            await asyncio.Event().wait()  # the client stays to the end
        return message or {}

    async def send(message: MutableMapping[str, Any]) -> None:
        """The answer is for nobody."""

    await app(scope, receive, send)


def engine_facts(config: VllmConfig) -> dict[str, Any]:
    """What the planner calibrates on, beside the workers' memory."""
    cache, model, scheduler = config.cache_config, config.model_config, config.scheduler_config
    return {
        "vllm_version": vllm_version,
        "block_size": cache.block_size,
        "num_gpu_blocks": cache.num_gpu_blocks,
        "kv_tokens": cache.kv_cache_size_tokens,
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "dtype": str(model.dtype).removeprefix("torch."),
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "pipeline_parallel_size": config.parallel_config.pipeline_parallel_size,
    }
