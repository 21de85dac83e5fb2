"""Does our model of the KV cache agree with the installed vLLM, figure by figure?

vLLM's own code makes groups and counts blocks from `KVCacheSpec` objects without an accelerator.
Each case here is computed twice, by it and by us, and everything must be equal.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rayserve.errors import SpecError
from rayserve.planner.kv.cache import (
    blocks_per_request,
    cache_capacity,
    cache_layout,
    concurrent_batches,
)
from rayserve.planner.kv.groups import aligned_block_size
from rayserve.planner.kv.layers import (
    CacheKind,
    state_layer,
)
from rayserve.units import GIB
from tests.contract.kv_cache_cases import (
    CASES,
    FULL,
    MAMBA2,
    QWEN_STATE,
    SLIDING,
    heads,
    pipelined,
    random_case,
    settings,
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """vLLM's configuration of a small model, with its figures free to be set."""
    from vllm.engine.arg_utils import EngineArgs

    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True)
    return arguments.create_engine_config()


def configured(engine, chosen, monkeypatch):
    """vLLM's configuration with the settings of a case."""
    from vllm.config import VllmConfig

    engine.model_config.max_model_len = chosen.max_model_len
    engine.model_config.original_max_model_len = chosen.max_model_len
    engine.scheduler_config.max_num_batched_tokens = chosen.max_num_batched_tokens
    engine.scheduler_config.disable_hybrid_kv_cache_manager = not chosen.hybrid_manager
    engine.parallel_config.decode_context_parallel_size = chosen.context_parallel
    engine.cache_config.block_size = chosen.block_size
    engine.cache_config.num_gpu_blocks_override = chosen.blocks_override or None
    engine.cache_config.mamba_cache_mode = "align" if chosen.prefix_caching else "none"
    engine.cache_config.kv_cache_layout = "BLHNC" if chosen.block_outermost else "LBNHC"
    batches, lookahead = chosen.concurrent_batches, chosen.retained_tokens + 1
    monkeypatch.setattr(VllmConfig, "max_concurrent_batches", property(lambda _: batches))
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", property(lambda _: lookahead))
    return engine


def spec_of(layer, block_size, padded, chosen):
    """The KVCacheSpec that vLLM makes for a layer, packed by the backend of its format."""
    import torch
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1 import kv_cache_interface as vllm_specs
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend

    if layer.kind is CacheKind.MAMBA:
        own = sum(layer.state_bytes)
        return vllm_specs.MambaSpec(
            shapes=tuple((size,) for size in layer.state_bytes),
            dtypes=(torch.uint8,) * len(layer.state_bytes),
            block_size=block_size if chosen.prefix_caching else chosen.max_model_len,
            page_size_padded=padded if padded and padded != own else None,
            mamba_cache_mode="align" if chosen.prefix_caching else "none",
            num_speculative_blocks=chosen.speculative_tokens,
            num_prefill_checkpoint_blocks=layer.checkpoint_blocks,
        )
    wide = layer.content_bytes == 4 * (layer.head_dim + layer.head_dim_v)
    plain = torch.float32 if wide else torch.bfloat16
    indexer = layer.format == "indexer"
    common = {
        "block_size": block_size,
        "num_kv_heads": layer.kv_heads,
        "head_size": layer.head_dim,
        "dtype": torch.uint8 if indexer else STR_DTYPE_TO_TORCH_DTYPE.get(layer.format, plain),
        "kv_quant_mode": vllm_specs.get_kv_quant_mode("auto" if indexer else layer.format),
    }
    if layer.alignment_bytes > 1:
        common["block_stride_alignment"] = layer.alignment_bytes
    if layer.kind is CacheKind.MLA:
        packed = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}.get(layer.format)
        return MLACommonBackend.customize_spec(
            vllm_specs.MLAAttentionSpec(
                **common,
                cache_dtype_str=None if indexer else layer.format,
                max_tp_shards=1,
                state_content_bytes=packed,
            )
        )
    common["head_size_v"] = layer.head_dim_v
    if layer.kind is FULL:
        spec = vllm_specs.FullAttentionSpec(**common)
    elif layer.kind is SLIDING:
        spec = vllm_specs.SlidingWindowSpec(**common, sliding_window=layer.window)
    else:
        spec = vllm_specs.ChunkedLocalAttentionSpec(**common, attention_chunk_size=layer.window)
    turbo = layer.format.startswith("turboquant")
    backend = TurboQuantAttentionBackend if turbo else TritonAttentionBackend
    return backend.customize_spec(spec)


def specs_of(one):
    """vLLM's specs by stage: layer name → spec; a layer's name is its place."""
    chosen = one.settings
    layers = [layer for stage in one.stages for layer in stage if not layer.shared]
    block_size = aligned_block_size(layers, chosen.block_size, chosen.kernel_block_sizes)
    token = max((layer.token_bytes for layer in layers), default=0)
    names = iter(range(len(layers)))
    return [
        {
            str(next(names)): spec_of(layer, block_size, block_size * token, chosen)
            for layer in stage
            if not layer.shared
        }
        for stage in one.stages
    ]


def vllm_figures(one, engine):
    """vLLM's answers: groups, blocks and the printed figures, or what its refusal proposes."""
    from vllm.v1.core import kv_cache_utils as vllm_utils

    stages = specs_of(one)
    merged = {name: spec for stage in stages for name, spec in stage.items()}
    tagged = {
        name: replace(spec, extra_retained_tokens=one.settings.retained_tokens)
        if hasattr(spec, "extra_retained_tokens")
        else spec
        for name, spec in merged.items()
    }
    groups = vllm_utils.get_kv_cache_groups(engine, tagged)
    projected = [vllm_utils._project_kv_cache_groups_to_worker(groups, stage) for stage in stages]
    block_bytes = [vllm_utils._pool_bytes_per_block(engine, own) for own in projected]
    override = one.settings.blocks_override
    pools = [
        override * block if override else have
        for have, block in zip(one.available, block_bytes, strict=True)
    ]
    estimates = [
        vllm_utils._estimate_max_model_len_from_groups(engine, own, pool - block)
        for own, pool, block in zip(projected, pools, block_bytes, strict=True)
        if block
    ]
    figures = {
        "groups": [tuple(map(int, group.layer_names)) for group in groups],
        "pages": [group.kv_cache_spec.page_size_bytes for group in groups],
        "block_sizes": [group.kv_cache_spec.block_size for group in groups],
        "block_bytes": block_bytes,
        "request_bytes": [
            vllm_utils._max_memory_usage_bytes_from_groups(engine, own) for own in projected
        ],
        "longest": min(estimates),
    }
    try:
        configs = vllm_utils.get_kv_cache_configs(engine, stages, list(one.available))
    except ValueError as error:
        if "KV cache is needed" not in str(error):
            raise
        return figures | {"fits": False}
    printed = vllm_utils.generate_scheduler_kv_cache_config(configs)
    tokens, concurrency = vllm_utils.get_kv_cache_capacity(engine, printed)
    return figures | {
        "fits": True,
        "blocks": printed.num_blocks,
        "tokens": tokens,
        "concurrency": concurrency,
    }


def our_figures(one):
    """The same by our model."""
    layout = cache_layout(one.stages, one.settings)
    capacity = cache_capacity(layout, one.available, one.settings)
    figures = {
        "groups": [group.layers for group in layout.groups],
        "pages": [group.page_bytes for group in layout.groups],
        "block_sizes": [group.block_size for group in layout.groups],
        "block_bytes": list(layout.stage_block_bytes),
        "request_bytes": list(capacity.request_bytes),
        "longest": capacity.estimated_max_model_len,
        "fits": capacity.fits,
    }
    if not capacity.fits:
        return figures
    return figures | {
        "blocks": capacity.num_blocks,
        "tokens": capacity.printed_tokens,
        "concurrency": capacity.max_concurrency,
    }


@pytest.mark.parametrize("name", CASES)
def test_every_figure_is_vllms(name, engine, monkeypatch):
    """Groups, pages, blocks, bytes of a request, concurrency, tokens and the longest length agree."""
    one = CASES[name]
    assert our_figures(one) == vllm_figures(one, configured(engine, one.settings, monkeypatch))


def test_cases_cover_refusals_and_starts():
    """The cases hold engines that start and such that vLLM refuses, in equal measure of kinds."""
    fits = {our_figures(one)["fits"] for one in CASES.values()}
    assert fits == {True, False}
    assert len(CASES) >= 40


def test_stage_without_cache_is_refused(engine, monkeypatch):
    """vLLM divides by zero where a pipeline stage keeps nothing; we say so before."""
    one = pipelined([[heads(8, 128)] * 8, []], [10 * GIB, 9 * GIB])
    with pytest.raises(ZeroDivisionError):
        vllm_figures(one, configured(engine, one.settings, monkeypatch))
    with pytest.raises(SpecError, match="stage"):
        our_figures(one)


def test_random_engines_agree(engine, monkeypatch):
    """300 random engines, hybrids and pipelines among them, agree figure by figure, or both refuse."""
    outcomes = {"started": 0, "too long": 0, "refused": 0}
    for seed in range(300):
        one = random_case(seed)
        chosen = configured(engine, one.settings, monkeypatch)
        try:
            ours = our_figures(one)
        except SpecError:
            with pytest.raises((ValueError, NotImplementedError)):
                vllm_figures(one, chosen)
            outcomes["refused"] += 1
            continue
        assert ours == vllm_figures(one, chosen), f"seed {seed}"
        outcomes["started" if ours["fits"] else "too long"] += 1
    assert min(outcomes.values()) >= 3, outcomes


def test_any_length_between_agrees(engine, monkeypatch):
    """Blocks of a request agree at every length, not only at max_model_len."""
    from vllm.v1.core import kv_cache_utils as vllm_utils

    for name in ("gemma3-27b", "llama4-in-flight", "qwen3-next-mtp", "gqa-context-parallel"):
        one = CASES[name]
        chosen = configured(engine, one.settings, monkeypatch)
        stages = specs_of(one)
        groups = vllm_utils.get_kv_cache_groups(chosen, dict(stages[0]))
        layout = cache_layout(one.stages, one.settings)
        for length in (1, 15, 16, 17, 1023, 4096, 12345, 99999):
            chosen.model_config.max_model_len = length
            theirs = vllm_utils._max_memory_usage_bytes_from_groups(chosen, groups)
            ours = blocks_per_request(layout, one.settings, length)
            assert ours * layout.stage_block_bytes[0] == theirs, (name, length)


def test_batches_in_flight_are_vllms(engine, monkeypatch):
    """The number of batches in flight follows vLLM's rule for both model runners."""
    from vllm.config import VllmConfig

    for flags in range(8):
        asynchronous, pipeline, second = bool(flags & 1), 1 + (flags >> 1 & 1), bool(flags & 4)
        monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda _, on=second: on))
        monkeypatch.setattr(engine.scheduler_config, "async_scheduling", asynchronous)
        monkeypatch.setattr(engine.parallel_config, "pipeline_parallel_size", pipeline)
        ours = concurrent_batches(
            async_scheduling=asynchronous, pipeline=pipeline, v2_runner=second
        )
        assert ours == engine.max_concurrent_batches


QWEN_NEXT_CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
}
NEMOTRON_CONFIG = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "attention_head_dim": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M*",
    "intermediate_size": 21504,
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "max_position_embeddings": 131072,
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
}


def aligned_by_vllm(folder, config, monkeypatch, *, kv_cache_dtype, block_size, prefix_caching):
    """The block size and padded state page that vLLM's platform code settles on."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    (folder / "config.json").write_text(json.dumps(config))
    # On a processor with it vLLM's CPU platform keeps states in float32, for kernels of its own.
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    engine = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=prefix_caching,
    ).create_engine_config()
    engine.cache_config.cache_dtype = kv_cache_dtype
    engine.cache_config.block_size = block_size
    engine.cache_config.mamba_page_size_padded = None
    backends = [TritonAttentionBackend]
    monkeypatch.setattr(Platform, "_find_non_ssm_backends", classmethod(lambda *_: backends))
    Platform._align_hybrid_block_size(engine, TritonAttentionBackend)
    return engine.cache_config.block_size, engine.cache_config.mamba_page_size_padded


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8_per_token_head"])
@pytest.mark.parametrize("block_size", [16, 64, 4096])
@pytest.mark.parametrize("model", ["qwen3-next", "nemotron-h"])
def test_states_raise_the_block_size_as_in_vllm(
    model, block_size, kv_cache_dtype, tmp_path, monkeypatch
):
    """From the real classes of two hybrids, vLLM derives the block size and page that we do."""
    config = QWEN_NEXT_CONFIG if model == "qwen3-next" else NEMOTRON_CONFIG
    state = state_layer(*QWEN_STATE) if model == "qwen3-next" else MAMBA2
    attention = heads(
        config["num_key_value_heads"], config["head_dim"], kv_cache_dtype=kv_cache_dtype
    )
    theirs = aligned_by_vllm(
        tmp_path,
        config,
        monkeypatch,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        prefix_caching=False,
    )
    chosen = settings(block_size=block_size)
    layout = cache_layout([[state, state, attention]], chosen)
    assert (layout.block_size, layout.page_bytes) == (theirs[0], theirs[1] or layout.page_bytes)
    assert sum(state.state_bytes) <= layout.page_bytes
