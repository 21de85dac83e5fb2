"""Does the accuracy benchmark judge a logged start by its own figures, and say what it leaves out?"""

from __future__ import annotations

import json

import pytest

from benchmarks.planner_accuracy import main
from benchmarks.planner_cases import case_inputs, find_record
from benchmarks.planner_recipes import named_format

CONFIG = {
    "model": "meta-llama/Llama-3.1-8B-Instruct", "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
# github.com/llm-d-incubation/llm-d-planner, accuracy/results/v0.19.0, one H100
STARTED = {
    "id": "started", "vllm_version": "0.19.0", "model": CONFIG["model"], "gpu": "H100-SXM5-80GB",
    "gpu_total_gib": 79.19, "tp": 1, "pp": 1, "dtype": "bfloat16", "kv_cache_dtype": "auto",
    "gpu_memory_utilization": 0.95, "max_model_len": 8192, "block_size": 16,
    "max_num_batched_tokens": 8192, "max_num_seqs": 1024, "notes": "prefix caching off",
    "weights_gib_per_gpu": 14.99, "kv_cache_gib_per_gpu": 58.11, "kv_tokens": 476016,
    "max_concurrency": 58.11, "outcome": "ok", "error": None, "config_key": CONFIG["model"],
}  # fmt: skip
REFUSED = {
    **STARTED, "id": "refused", "gpu": "RTX 3090", "gpu_total_gib": 15.77,
    "weights_gib_per_gpu": None, "kv_cache_gib_per_gpu": None, "kv_tokens": None,
    "max_concurrency": None, "outcome": "error", "error": "No available memory for the KV cache",
}  # fmt: skip


def judged(tmp_path, cases):
    """Exit code and report of the benchmark."""
    paths = [tmp_path / name for name in ("cases.json", "configs.json", "out.json")]
    paths[0].write_text(json.dumps(cases))
    paths[1].write_text(json.dumps([CONFIG]))
    arguments = [str(paths[0]), "--configs", str(paths[1]), "--json", str(paths[2]), "--verbose"]
    return main(arguments), json.loads(paths[2].read_text())


def test_a_right_prediction_passes_every_bar(tmp_path, capsys):
    """A start and a refusal that are predicted right give exit code 0."""
    code, report = judged(tmp_path, [STARTED, REFUSED])
    rows = {row["id"]: row for row in report["rows"]}
    assert code == 0, capsys.readouterr().out
    assert abs(rows["started"]["kv_error"]) < 0.01
    assert rows["started"]["inside"]
    assert rows["refused"]["verdict"].startswith("cannot fit")
    assert all(bar["passed"] for bar in report["bars"])


def test_a_wrong_figure_fails(tmp_path):
    """Weights that differ by a tenth miss a bar, and the exit code says so."""
    code, report = judged(tmp_path, [{**STARTED, "weights_gib_per_gpu": 16.5}, REFUSED])
    assert code == 1
    assert [bar["name"] for bar in report["bars"] if not bar["passed"]] == [
        "weights, mean error %",
        "weights, worst error %",
    ]


def test_what_is_left_out_has_its_reason(tmp_path):
    """A case without a config, and one without a version, are not judged and say why."""
    alone = {**STARTED, "id": "alone", "model": "a/b", "config_key": None}
    undated = {**STARTED, "id": "undated", "vllm_version": None}
    _, report = judged(tmp_path, [alone, undated])
    rows = {row["id"]: row for row in report["rows"]}
    assert "config" in rows["alone"]["no_weights"]
    assert "version" in rows["undated"]["no_end_to_end"]


@pytest.mark.parametrize(
    "model,own,wanted",
    [
        ("a/Model", None, None),
        ("a/Model-FP8", None, "fp8"),
        ("RedHatAI/Model-FP8-dynamic", None, "compressed-tensors"),
        ("RedHatAI/Model-quantized.w4a16", None, "compressed-tensors"),
        ("meta-llama/Model-FP8", None, "fbgemm_fp8"),
        ("a/Model-AWQ-INT4", None, "awq"),
        ("a/Model-AutoRound", None, "gptq"),
        ("moonshotai/Kimi-K2-Thinking", None, "compressed-tensors"),
        ("nvidia/Qwen3.6-27B-NVFP4", None, "modelopt"),
        ("a/Other", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ("a/Other-BF16", {"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
    ],
)
def test_a_checkpoint_whose_log_tells_no_format_has_that_of_its_name(model, own, wanted):
    """Or that of the model itself, where it was published so."""
    record = CONFIG | {"quantization_config": own}
    found = case_inputs({**STARTED, "model": model}, record).config.get("quantization_config")
    assert (found and found["quant_method"]) == wanted


def test_the_pieces_of_a_mixed_checkpoint_are_named():
    """NVIDIA's Qwen3.6: attention in FP8, the rest and the head in NVFP4 with inputs of 16 bits."""
    case = {**STARTED, "model": "nvidia/Qwen3.6-27B-NVFP4"}
    found = case_inputs(case, CONFIG).config["quantization_config"]
    layers = found["quantized_layers"]
    assert layers["lm_head"] == {"quant_algo": "W4A16_NVFP4"}
    path = "model.language_model.layers.31"
    assert layers[f"{path}.self_attn.q_proj"] == {"quant_algo": "FP8"}
    assert layers[f"{path}.mlp.up_proj"] == {"quant_algo": "W4A16_NVFP4"}
    assert named_format("qwen3-32b") == ""


def test_a_record_is_found_by_its_aliases():
    """Where no case names it by its own name, in whatever case the letters are."""
    records = [CONFIG | {"aliases": ["RedHatAI/Some-8B-FP8"]}]
    assert find_record({"model": "redhatai/some-8b-fp8"}, records) is records[0]
    assert find_record({"model": "another"}, records) is None
    assert find_record({"model": None}, records) is None
