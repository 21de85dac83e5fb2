"""What does the spec itself say of an expected request, and of CUDA graphs?"""

from __future__ import annotations

from rayserve.spec import ClusterSpec


def expected(spec: ClusterSpec, length: int) -> tuple[int, int]:
    """(prompt, answer) of the expected request, in tokens, within a max_model_len of `length`."""
    output = min(spec.workload.output_tokens, max(1, length // 2))
    return max(1, min(spec.workload.prompt_tokens, length - output)), output


def compilation(spec: ClusterSpec) -> dict[str, object]:
    """The spec's own `compilation_config`; empty: there is none."""
    written = spec.engine_args.get("compilation_config")
    return written if isinstance(written, dict) else {}


def fine_graphs(spec: ClusterSpec) -> bool:
    """Whether each small batch gets a graph: for latency, unless a person said which sizes do."""
    names = {"performance_mode", "cudagraph_capture_sizes"}
    chosen = names & {*spec.engine_args, *compilation(spec)}
    return spec.aim == "latency" and spec.scheduling.cuda_graphs is not False and not chosen
