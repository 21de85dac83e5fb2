"""What can the named GPU not do with these flags, and what do they cost the aim?

Every figure says its basis: `computed` from measured parts, `read` in vLLM's own code, or `reported` in
a thread.
"""

from __future__ import annotations

from rayserve.planner.arguments import FP8_KV_CAPABILITY
from rayserve.planner.convert.draft import Draft, shown
from rayserve.planner.convert.eager import judge_eager
from rayserve.planner.weights.architecture import Architecture

PCIE_GB_PER_S = 25.0
"""What a PCIe 4.0 x16 link carries in practice."""
LOGIT_BYTES = 39
"""Bytes of a sampling step for each request and token of the vocabulary: fitted to the profile runs of
vLLM 0.11 to 0.16 logs, and the one current A100 point; 15 was right for 0.17 to 0.19.
"""
VOCABULARY = 128_256
FEW_REQUESTS = 64
SWITCHED_OFF = {
    "enable_prefix_caching": (
        "scheduling.prefix_caching",
        "a prompt's common beginning is computed anew: on one A100 with an 8B model 182 ms, not 45 ms",
    ),
    "enable_chunked_prefill": (
        "scheduling.chunked_prefill",
        "a long prompt stalls all running answers until it is computed",
    ),
}
"""Switches that cost latency when off: the key, and the price."""
BF16_CAPABILITY = 8.0
FP8_CAPABILITY = 8.9


def judge_hardware(draft: Draft) -> None:
    """What the named GPU cannot do, or does otherwise than the flag suggests."""
    gpu = draft.context.gpu
    kv_type = str(draft.get("precision.kv_cache_dtype", "auto"))
    if gpu is None:
        if kv_type.startswith("fp8") or str(draft.get("precision.quantization", "")).startswith(
            "fp8"
        ):
            draft.find(
                "note", "hardware", "", "fp8 is not checked", why="no GPU is named", do="give --gpu"
            )
        return
    backend = draft.get("engine_args.attention_backend")
    if kv_type.startswith("fp8") and gpu.compute_capability < FP8_KV_CAPABILITY and backend is None:
        draft.drop("precision.kv_cache_dtype")
        draft.find(
            "error",
            "hardware",
            draft.given["kv_cache_dtype"],
            f"{gpu.name} keeps no {kv_type} KV cache in its default attention backend",
            why="FlashAttention on compute capability 8.x takes 16 bits, and Triton cannot make e4m3 there",
            do="it is auto here; or keep it, with `attention_backend: FLASHINFER` under engine_args",
            certainty="read",
            source="vLLM 0.32.0; vllm#24577",
        )
    method = str(draft.get("precision.quantization", ""))
    if method.startswith("fp8") and gpu.compute_capability < FP8_CAPABILITY:
        draft.find(
            "warning",
            "hardware",
            draft.given["quantization"],
            f"{gpu.name} has no FP8 arithmetic: fp8 shrinks the weights and nothing else",
            why="they are expanded by Marlin kernels: up to twice as fast where memory is the limit, no gain "
            "for prompts. A checkpoint that is quantized says its method itself; weights of 4 bits are half "
            "the bytes to read for a token (`rayserve plan --candidates` computes what that saves)",
            do="take a checkpoint of 4 bits (W4A16) for fast tokens, or W8A8 INT8 for fast prompts, and "
            "leave the flag out",
            certainty="reported",
            source="vllm#5975; vLLM 0.32.0",
        )
    if draft.get("precision.dtype") == "bfloat16" and gpu.compute_capability < BF16_CAPABILITY:
        draft.find(
            "error",
            "hardware",
            draft.given["dtype"],
            f"{gpu.name} has no bfloat16",
            why="compute capability 8.0 is the first that has it",
            do="write float16",
            certainty="read",
        )


def judge_split(draft: Draft) -> None:
    """Whether the ranks fit the GPUs that the command and the options show."""
    tensor = draft.get("parallelism.tensor", 1)
    ranks = tensor * draft.get("parallelism.pipeline", 1) * draft.get("replicas.min", 1)
    context = draft.context
    visible = (context.gpus_per_host or draft.command.gpus) * max(1, context.hosts)
    # A command or a pod shows the GPUs of one host; further stages may stand on others.
    one_host = draft.get("parallelism.pipeline", 1) == 1 and not context.gpus_per_host
    if 0 < visible < ranks and (context.hosts or one_host):
        draft.find(
            "error",
            "hardware",
            "",
            f"{ranks} ranks for {visible} GPUs",
            why="a rank is a GPU",
            do="give --hosts and --gpus-per-host, or lower the parallelism",
        )


def judge_aim(draft: Draft, architecture: Architecture | None) -> None:
    """What costs latency or throughput, with the price."""
    given, aim = draft.given, draft.context.aim
    if draft.get("scheduling.cuda_graphs") is False and "enforce_eager" in given:
        judge_eager(draft, given["enforce_eager"], architecture)
    offload = draft.get("engine_args.cpu_offload_gb", 0)
    if offload:
        price = offload * 2**30 / (PCIE_GB_PER_S * 1e9) * 1000
        draft.find(
            "warning",
            "aim",
            given["cpu_offload_gb"],
            f"{given['cpu_offload_gb'].written} {offload:g} costs about {price:.0f} ms a token",
            why=f"{offload:g} GiB of weights cross PCIe in every step, at about {PCIE_GB_PER_S:g} GB/s",
            do="take a smaller checkpoint, or more GPUs",
            certainty="computed",
        )
    if draft.get("engine_args.disable_custom_all_reduce") is True:
        draft.find(
            "warning",
            "aim",
            given["disable_custom_all_reduce"],
            "ranks of one host then talk through NCCL, which takes longer for the small messages of decoding",
            do="leave it out unless the host has no NVLink, or the kernel fails there",
        )
    if aim == "latency":
        _judge_latency(draft)
    elif aim == "throughput" and 0 < draft.get("limits.max_num_seqs", 0) < FEW_REQUESTS:
        draft.find(
            "warning",
            "aim",
            given["max_num_seqs"],
            f"{draft.get('limits.max_num_seqs')} requests at once leave the GPUs waiting for memory",
            why="the weights are read once a step, however many requests share it",
            do="leave it to the planner, or write 256",
            certainty="computed",
        )


def _judge_latency(draft: Draft) -> None:
    given = draft.given
    stages = draft.get("parallelism.pipeline", 1)
    if stages > 1 and "pipeline_parallel_size" in given:
        draft.find(
            "warning",
            "aim",
            given["pipeline_parallel_size"],
            f"a token passes {stages} stages, one after the other",
            why="stages add memory, not speed, for a single request",
            do="cut over the GPUs of one host first (`tensor`); stages only where one host does not hold it",
        )
    seqs = draft.get("limits.max_num_seqs", 0)
    if isinstance(seqs, int) and seqs > FEW_REQUESTS and "max_num_seqs" in given:
        vocabulary = draft.context.config.get("vocab_size")
        size = vocabulary if isinstance(vocabulary, int) and vocabulary > 0 else VOCABULARY
        gib = LOGIT_BYTES * seqs * size / 2**30
        draft.find(
            "note",
            "aim",
            given["max_num_seqs"],
            f"{seqs} requests at once slow one another, and keep about {gib:.2f} GiB a GPU for sampling",
            why=f"about {LOGIT_BYTES} bytes for each request and each of {size} tokens; 15 to 39 by release",
            do="write 32 for a few users; the rest waits at the door",
            certainty="computed",
        )
    for name, (key, cost) in SWITCHED_OFF.items():
        if name in given and draft.get(key) is False:
            draft.find(
                "warning",
                "aim",
                given[name],
                f"{given[name].written} is off",
                why=cost,
                do=f"leave {key} on",
            )
    if draft.get("engine_args.performance_mode") == "throughput":
        draft.find(
            "warning",
            "aim",
            given["performance_mode"],
            f"{given['performance_mode'].written} {shown(given['performance_mode'])} serves the other aim",
            do="leave it out: the planner asks for `interactivity`",
        )
