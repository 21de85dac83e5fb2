"""Does the accuracy benchmark judge a logged start by its own figures, and say what it leaves out?"""

from __future__ import annotations

import json

import pytest

from benchmarks.planner_accuracy import main
from benchmarks.planner_cases import case_inputs, find_record, out_of_scope
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


def test_a_bar_that_no_case_asks_is_not_missed(tmp_path, capsys):
    """A file without a refusal passes by what it has; one in which nothing can be judged does not."""
    code, report = judged(tmp_path, [STARTED])
    assert code == 0
    assert report["bars"][-1]["passed"] is None
    assert "not measured, no case" in capsys.readouterr().out
    assert judged(tmp_path, [{**STARTED, "config_key": None, "model": "a/b"}])[0] == 1


@pytest.mark.parametrize("content", [None, "{", "{}", '{"cases": 1}', "[1]"])
def test_a_file_of_something_else_is_told(tmp_path, capsys, content):
    """No traceback and exit code 2, which no missed bar gives."""
    cases, configs = tmp_path / "cases.json", tmp_path / "configs.json"
    configs.write_text(json.dumps([CONFIG]))
    if content is not None:
        cases.write_text(content)
    assert main([str(cases), "--configs", str(configs)]) == 2
    assert "cases.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "strange", [{"tp": "many"}, {"weights_gib_per_gpu": "15 GiB"}, {"id": None}]
)
def test_one_strange_case_does_not_stop_the_others(tmp_path, strange):
    """It is left out with its reason, or judged where the strange part does not matter."""
    _, report = judged(tmp_path, [STARTED | strange, STARTED])
    assert len(report["rows"]) == 2
    assert abs(report["rows"][1]["kv_error"]) < 0.01
    assert report["rows"][0]["kv_error"] is not None or report["rows"][0]["no_end_to_end"]


def test_a_case_may_leave_out_how_it_ended(tmp_path):
    """Figures of an engine tell that it started, an error that it did not."""
    rows = judged(
        tmp_path,
        [
            {key: value for key, value in case.items() if key != "outcome"}
            for case in (STARTED, REFUSED)
        ],
    )[1]["rows"]
    assert [row["verdict_right"] for row in rows] == [True, True]


def test_cases_may_stand_in_an_object(tmp_path):
    """Under `cases`, as some files have them."""
    paths = [tmp_path / name for name in ("cases.json", "configs.json")]
    paths[0].write_text(json.dumps({"cases": [STARTED]}))
    paths[1].write_text(json.dumps({"models": [CONFIG]}))
    assert main([str(paths[0]), "--configs", str(paths[1])]) == 0


@pytest.mark.parametrize(
    "notes,left_out",
    [
        ("cpu_offload 40 GiB/rank (experts, UVA)", True),
        ("prefix caching off; weights offloaded to host", True),
        ("no CPU offload", False),
        ("without cpu_offload; EP4", False),
        ("cpu offload off", False),
        ("KV offloading to host memory", False),
        ("", False),
    ],
)
def test_only_offloaded_weights_leave_a_case_out(notes, left_out):
    """A note that none are offloaded, or that the cache is, does not."""
    assert bool(out_of_scope({**STARTED, "notes": notes})) == left_out


def test_leaving_a_family_out_refits_what_is_empirical(tmp_path):
    """A family whose logs all have half a GiB less is not judged by its own logs, but by the others'."""
    odd = {
        "model": "a/odd",
        "config_key": "a/odd",
        "kv_cache_gib_per_gpu": 57.61,
        "kv_tokens": None,
    }
    paths = [tmp_path / name for name in ("cases.json", "configs.json", "out.json")]
    cases = [
        STARTED,
        *[{**STARTED, **odd, "id": f"odd{n}", "max_concurrency": None} for n in range(3)],
    ]
    paths[0].write_text(json.dumps(cases))
    other = {**CONFIG, "model": "a/odd", "architectures": ["MistralForCausalLM"]}
    paths[1].write_text(json.dumps([CONFIG, other]))
    main([str(paths[0]), "--configs", str(paths[1]), "--json", str(paths[2])])
    worst = json.loads(paths[2].read_text())["leave_one_family_out"]["worst_by_family_percent"]
    assert worst["Llama"] == pytest.approx(100 * 0.5 / 58.11, abs=0.1)
    assert worst["Mistral"] == pytest.approx(100 * 0.5 / 57.61, abs=0.1)


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
