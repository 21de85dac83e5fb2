"""Which command measures what an estimate leaves uncertain?"""

from __future__ import annotations

from rayserve.planner.memory.budget import measure_command
from rayserve.planner.memory.simple import Cut
from rayserve.planner.memory.versions import Batch
from rayserve.planner.profile import ModelProfile
from rayserve.planner.wishes import fine_graphs
from rayserve.spec import ClusterSpec

MEASURED_LAYERS = 4
"""Of full width on each stage: what is measured does not depend on depth."""


def measure_start(
    spec: ClusterSpec, profile: ModelProfile, cut: Cut, batch: Batch, length: int
) -> str:
    """The vLLM command that measures activation, NCCL and graphs of such a cut on its GPUs.

    `length`: max_model_len.
    """
    arguments: dict[str, object] = {
        "tensor_parallel_size": cut.tensor,
        "pipeline_parallel_size": cut.pipeline,
        "max_model_len": length,
        "max_num_seqs": batch.seqs,
        "max_num_batched_tokens": batch.step_tokens,
        "gpu_memory_utilization": spec.limits.gpu_memory_utilization,
        "kv_cache_dtype": spec.precision.kv_cache_dtype,
        "dtype": spec.precision.dtype,
        "enforce_eager": spec.scheduling.cuda_graphs is False,
    }
    if spec.precision.quantization != "auto":
        arguments["quantization"] = spec.precision.quantization
    if fine_graphs(spec):
        arguments["performance_mode"] = "interactivity"
    return measure_command(
        spec.model.path or spec.model.hf_id,
        arguments,
        layers=MEASURED_LAYERS * cut.pipeline,
        kinds=profile.layer_kinds,
        text_config=profile.nested,
    )
