"""What takes GPU memory but stands in no term of the estimate?"""

from __future__ import annotations

from rayserve.planner.weights.architecture import Architecture
from rayserve.spec import ClusterSpec

UNMODELLED = frozenset(
    {
        "async_scheduling",
        "data_parallel_size",
        "decode_context_parallel_size",
        "enable_dbo",
        "kv_cache_dtype_skip_layers",
        "mamba_block_size",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "max_cudagraph_capture_size",
        "mm_ipc_gpu_memory_gb",
        "offload_group_size",
        "prefill_context_parallel_size",
    }
)
"""Engine arguments that change the memory in ways that no term follows."""
UNMODELLED_ENV = frozenset({"VLLM_USE_V2_MODEL_RUNNER", "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"})


def uncounted(
    spec: ClusterSpec, architecture: Architecture | None, *, drafted: bool = False
) -> list[str]:
    """What takes GPU memory but stands in no term; `drafted`: the draft model has its own."""
    guess = spec.speculative
    what: list[str] = []
    if architecture is not None:
        what += [f"engine_args.{name}" for name in sorted(UNMODELLED & {*spec.engine_args})]
        what += [f"env.{name}" for name in sorted(UNMODELLED_ENV & {*spec.env})]
    if guess is None or guess.method in ("ngram", "suffix") or drafted:
        return what
    if guess.method != "mtp":
        return [*what, f"the draft model {guess.model}: give speculative.config"]
    known = architecture is None or bool(architecture.draft)  # the sum has them
    do = "config.json does not describe them"
    return what if known else [*what, f"the layers that guess (mtp): {do}"]
