"""Does the traffic of a pass follow from the architecture, for every kind of layer and format?"""

from __future__ import annotations

import json

import pytest

from benchmarks import planner_latency as published
from rayserve.errors import Where
from rayserve.planner.catalogue import gpus
from rayserve.planner.speed.latency import Setting, tpot
from rayserve.planner.speed.rooflines import WeightFormat
from rayserve.planner.speed.traffic import fp4_compute, traffic
from rayserve.planner.weights.architecture import read_architecture
from tests.bad_specs import ROOT

A100, H200, B200 = (gpus()[name] for name in ("A100-80GB-SXM", "H200-141GB-SXM", "B200-180GB-SXM"))
HERE = Where("config.json")


def moves(config, gpu=A100, **options):
    """The traffic of a config.json's content."""
    return traffic(read_architecture(config, HERE), gpu, **options)


def golden(name: str):
    """A config.json of the golden specs."""
    return json.loads((ROOT / "tests" / "golden" / "configs" / f"{name}.json").read_text())


def weights(found, **wanted):
    """(bytes, parameters) of the weights with these fields."""
    chosen = [one for one in found.weights if all(getattr(one, k) == v for k, v in wanted.items())]
    return sum(one.size_bytes for one in chosen), sum(one.parameters for one in chosen)


def test_a_dense_model_reads_its_matrices_and_its_head():
    """Llama-3.1-70B on 4 ranks: a quarter of each matrix, the head only for sampled tokens."""
    found = moves(golden("llama-70b"), tensor=4)
    layer = 8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672
    assert weights(found, sampled_only=False) == (2 * 80 * layer / 4, 80 * layer / 4)
    head = 128256 * 8192 / 4
    assert weights(found, sampled_only=True) == (2 * head, head)
    assert found.all_reduces == 2 * 80 + 1
    assert (found.small_kernels, found.operators) == (6 * 80, 10 * 80)
    (attention,) = found.attention
    assert (attention.layers, attention.query_heads) == (80, 16)
    assert attention.kv_bytes_per_token == 2 * 2 * 128 * 2
    assert found.activation_bytes_per_token == 2 * 80 * (10 * 8192 + 6 * 28672 / 4)


def test_one_rank_sends_nothing():
    """Without tensor parallelism there are no all-reduces."""
    assert moves(golden("llama-8b")).all_reduces == 0


def test_key_heads_are_copied_beyond_their_number():
    """With 4 KV heads on 8 ranks each keeps one, and reads as much of the cache as with 4 ranks."""
    config = {**golden("llama-8b"), "num_key_value_heads": 4}
    four, eight = (moves(config, tensor=ranks).attention[0] for ranks in (4, 8))
    assert four.kv_bytes_per_token == eight.kv_bytes_per_token
    assert four.query_heads == 2 * eight.query_heads


def test_a_tied_head_is_the_embedding():
    """A model whose head is its embedding reads that for each sampled token, and once."""
    tied = {**golden("llama-8b"), "tie_word_embeddings": True}
    assert weights(moves(tied), name="head") == weights(moves(golden("llama-8b")), name="head")


@pytest.mark.parametrize(
    "quantization, kind, bytes_per_weight",
    [
        (None, WeightFormat.BF16, 2),
        ({"quant_method": "fp8"}, WeightFormat.FP8, 1),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, WeightFormat.FP8, 1),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, WeightFormat.W4A16, 0.52),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, WeightFormat.W8A16, 1.02),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 8, "type": "int"},
                        "input_activations": {"num_bits": 8, "type": "int", "dynamic": True},
                    }
                },
            },
            WeightFormat.W8A8,
            1,
        ),
    ],
)
def test_bytes_and_products_follow_the_format(quantization, kind, bytes_per_weight):
    """Each format is multiplied as vLLM does, and read with its scales; the head stays in bf16."""
    found = moves({**golden("llama-8b"), "quantization_config": quantization})
    size, parameters = weights(found, format=kind, sampled_only=False)
    assert parameters == weights(moves(golden("llama-8b")), sampled_only=False)[1]
    assert size / parameters == pytest.approx(bytes_per_weight, rel=0.02)
    assert weights(found, format=WeightFormat.BF16, sampled_only=True)[1] == 128256 * 4096


def test_what_stays_unquantized_is_read_in_16_bits():
    """FP8 of Llama-3.1-405B with attention left alone has weights of two formats."""
    found = moves(published.LLAMA_405B_FP8, tensor=8)
    attention = 16384 * 128 * 2 * (128 + 8) / 8 * 126
    assert weights(found, format=WeightFormat.BF16, sampled_only=False)[1] == attention
    assert weights(found, format=WeightFormat.FP8)[1] == 3 * 16384 * 53248 / 8 * 126


def test_of_experts_a_token_reads_those_that_it_chose():
    """Qwen3-30B-A3B: routed experts stand apart, with the router's choice; the router is on all ranks."""
    found = moves(published.QWEN3_30B, tensor=2)
    routed = 3 * 2048 * 768 * 128 * 48 / 2
    assert weights(found, name="experts", experts=128, experts_per_token=8)[1] == routed
    (experts,) = (one for one in found.weights if one.name == "experts")
    assert experts.least == 8 / 128
    # two norms of the layer, and those of queries and keys
    assert (found.small_kernels, found.operators) == ((11 + 2) * 48, (16 + 2) * 48)
    one_rank = weights(moves(published.QWEN3_30B), name="matrices")[1]
    router = 2048 * 128 * 48
    assert weights(found, name="matrices")[1] == (one_rank - router) / 2 + router


def test_whole_experts_weigh_as_much_as_slices():
    """Expert parallelism gives a rank as many weights, as whole experts."""
    slices = moves(published.QWEN3_30B, tensor=8)
    whole = moves(published.QWEN3_30B, tensor=8, expert_ranks=8)
    assert weights(whole, name="experts") == weights(slices, name="experts")


def test_latent_attention_reads_one_vector_and_multiplies_it_when_decoding():
    """DeepSeek-R1: 576 elements a token on every rank; a decoded query meets the latent vector."""
    found = moves(published.R1_AWQ, tensor=8)
    (attention,) = found.attention
    assert attention.kv_bytes_per_token == 576 * 2
    assert attention.query_heads == 16
    assert (attention.key_dim, attention.value_dim, attention.step_dim) == (192, 128, 1088)
    assert attention.step_flops(1000) == 2 * 61 * 16 * 1088 * 1000
    # kv_b_proj is multiplied into queries and outputs, in 16 bits, whatever its format
    absorbed = 512 * 16 * 256 * 61
    router = 7168 * 256 * 58
    assert weights(found, format=WeightFormat.BF16, sampled_only=False)[1] == absorbed + router


SPARSE = {**published.R1_AWQ, "architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048,
          "index_head_dim": 128, "index_n_heads": 64, "quantization_config": None}  # fmt: skip


def test_sparse_attention_reads_chosen_tokens_and_all_of_the_indexers():
    """DeepSeek-V3.2: at most 2048 latent vectors, and an index key of every token."""
    chosen, indexer = moves(SPARSE, H200, tensor=8).attention
    assert chosen.read_bytes(100_000) == chosen.read_bytes(2048) == 61 * 1152 * 2048
    assert indexer.read_bytes(100_000) == 61 * (128 + 4) * 100_000
    assert indexer.flops(1) == 61 * 64 * 128  # counted in fp8, half as long as in bf16


def test_windows_and_chunks_bound_what_is_read():
    """Gemma-3 has five sliding layers of six; Llama-4 three chunked of four, each half full on average."""
    kinds = {kind.window: kind.layers for kind in moves(published.GEMMA3_4B).attention}
    assert kinds == {1024: 29, 0: 5}
    llama4 = {**golden("llama-8b"), "architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 8,
              "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 8192}  # fmt: skip
    local = next(kind for kind in moves(llama4).attention if kind.chunked)
    assert (local.layers, local.seen(8000), local.seen(100_000)) == (6, 8000, 4096)
    assert local.pairs(0, 8192 * 3 + 2) == 3 * 8192 * 8193 / 2 + 3
    assert local.pairs(0, 5000) + local.pairs(5000, 15000) == local.pairs(0, 20000)


HYBRID = {"architectures": ["Qwen3NextForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48,
          "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936,
          "intermediate_size": 5120, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
          "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_conv_kernel_dim": 4,
          "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
          "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144}  # fmt: skip


def test_recurrent_layers_read_a_state_whatever_the_context():
    """Qwen3-Next: 36 layers keep a state, 12 the context; the state is read and written."""
    found = moves(HYBRID)
    kinds = {kind.layers: kind for kind in found.attention}
    state = kinds[36]
    assert state.read_bytes(10) == state.read_bytes(100_000)
    assert state.state_bytes == 32 * 128 * 128 * 2 + (2 * 16 * 128 + 32 * 128) * 3 * 2
    assert state.pairs(500, 100) == 100
    assert kinds[12].read_bytes(1000) == 12 * 2 * 2 * 256 * 2 * 1000
    grows = [tpot(found, Setting(A100, 2048), 8, size).terms["kv"].middle for size in (1, 100_000)]
    assert 0 < grows[0] < grows[1]


def test_each_norm_is_a_kernel():
    """Gemma-3 has four norms a layer and two of queries and keys, Llama two."""
    gemma = moves(published.GEMMA3_4B)
    assert (gemma.small_kernels, gemma.operators) == ((6 + 4) * 34, (10 + 4) * 34)
    vectors = 2 * (5 * 2 + 2 * 2) * 2560 + 2 * 6 * 10240
    assert gemma.activation_bytes_per_token == 34 * vectors


def test_a_layer_of_one_block_reduces_once():
    """Nemotron-H: a layer is a mixer, an MLP or experts, so it has one all-reduce and its own norms."""
    config = {"architectures": ["NemotronHForCausalLM"], "hidden_size": 1024, "vocab_size": 32000,
              "num_hidden_layers": 4, "hybrid_override_pattern": "M-*-", "num_attention_heads": 8,
              "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 4096,
              "mamba_num_heads": 16, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
              "conv_kernel": 4, "max_position_embeddings": 8192}  # fmt: skip
    found = moves(config, tensor=2)
    assert found.all_reduces == 4 + 1
    # a norm for each layer, and one within the Mamba-2 mixer
    assert (found.small_kernels, found.operators) == (5 + 2 * 3 + 2 * 1, 5 + 2 * 5 + 2 * 3)
    assert sum(kind.layers for kind in found.attention) == 2


def test_four_bit_products_exist_on_blackwell_alone():
    """NVFP4 weights and inputs are widened on an A100, and counted at fp8's rate on a B200."""
    config = {**golden("llama-8b"),
              "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}  # fmt: skip
    architecture = read_architecture(config, HERE)
    assert fp4_compute(architecture, B200)
    assert not fp4_compute(architecture, A100)
    assert weights(traffic(architecture, A100), format=WeightFormat.W4A16)[1] > 0
    assert weights(traffic(architecture, B200), format=WeightFormat.W4A16)[1] == 0
