"""Are the other tools' formulas theirs, and does the comparison judge everybody by the same cases?"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import planner_hf_mem
from benchmarks.planner_cases import case_inputs
from benchmarks.planner_checkpoint import Checkpoint, case_checkpoint
from benchmarks.planner_formulas import Answer, Question, gpustack, hf_mem, llm_d_planner
from benchmarks.planner_hf_mem import ask, respond
from benchmarks.planner_rivals import OURS, RIVALS, compare, logged_figures, main
from benchmarks.planner_scores import (
    Compared,
    Logged,
    bars,
    campaign_table,
    error_table,
    score,
    shared,
    verdict_table,
)
from rayserve.units import GIB

LLAMA = {
    "model": "meta-llama/Llama-3.1-8B-Instruct", "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_BYTES = 16_060_522_496  # safetensors' own total of meta-llama/Llama-3.1-8B-Instruct
# github.com/llm-d-incubation/llm-d-planner, accuracy/results/v0.19.0, one H100
STARTED = {
    "id": "started", "vllm_version": "0.19.0", "model": LLAMA["model"], "gpu": "H100-SXM5-80GB",
    "url": "https://github.com/llm-d-incubation/llm-d-planner/x.log", "gpu_mem_gb": 80,
    "gpu_total_gib": 79.19, "tp": 1, "pp": 1, "dtype": "bfloat16", "kv_cache_dtype": "auto",
    "gpu_memory_utilization": 0.95, "max_model_len": 8192, "block_size": 16,
    "max_num_batched_tokens": 8192, "max_num_seqs": 1024, "notes": "prefix caching off",
    "weights_gib_per_gpu": 14.99, "kv_cache_gib_per_gpu": 58.11, "kv_tokens": 476016,
    "max_concurrency": 58.11, "activation_gib": 1.89, "outcome": "ok", "error": None,
    "config_key": LLAMA["model"],
}  # fmt: skip
REFUSED = {
    **STARTED, "id": "refused", "gpu": "RTX 3090", "gpu_total_gib": 15.77, "gpu_mem_gb": 16,
    "weights_gib_per_gpu": None, "kv_cache_gib_per_gpu": None, "kv_tokens": None,
    "max_concurrency": None, "activation_gib": None, "outcome": "error",
    "error": "No available memory for the KV cache",
}  # fmt: skip


def question(**changes):
    """The question of the logged start of Llama-3.1-8B."""
    asked = Question(
        config=LLAMA,
        checkpoint=Checkpoint((("BF16", LLAMA_BYTES // 2),)),
        ranks=1,
        tensor=1,
        max_model_len=8192,
        utilization=0.95,
        total_gib=79.19,
        catalogue_gib=80,
    )
    return replace(asked, **changes)


def percent(found, logged):
    """Signed error as the published report prints it."""
    return round(100 * (found / logged - 1), 2)


def config(**changes):
    """Llama's config with other fields."""
    return {**LLAMA, **changes}


# ── the checkpoint that every tool is given ─────────────────────────────────────────────────────


def test_a_checkpoint_put_together_has_the_published_bytes():
    """Llama-3.1-8B: every tensor of its files, neither padded nor with vLLM's tables."""
    found = case_checkpoint(case_inputs(STARTED, LLAMA), "x")
    assert found.elements == (("BF16", LLAMA_BYTES // 2),)
    assert found.size_bytes == LLAMA_BYTES


def test_flags_of_the_engine_do_not_change_the_checkpoint():
    """Neither another dtype nor FP8 made while loading is in the files."""
    for flags in ({"dtype": "float32"}, {"quantization": "fp8"}):
        found = case_checkpoint(case_inputs({**STARTED, **flags}, LLAMA), "x")
        assert found.size_bytes == LLAMA_BYTES


def test_a_packed_checkpoint_counts_words_of_32_bits():
    """GPTQ of 4 bits and 128: matrices, zero points and order in I32, scales and the rest in bf16."""
    case = {**STARTED, "model": "x/Llama-3.1-8B-quantized.w4a16", "quantization": "gptq"}
    stored = dict(case_checkpoint(case_inputs(case, LLAMA), "x").elements)
    weights = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    order = 32 * (3 * 4096 + 14336)
    assert stored["I32"] == weights // 8 + weights // 128 // 8 + order
    assert stored["BF16"] == 2 * 128256 * 4096 + (32 * 2 + 1) * 4096 + weights // 128


# ── llm-d-planner: the formula gives what its own report printed ────────────────────────────────


def test_llm_d_planner_errs_as_it_published_for_llama():
    """accuracy_report.md, Llama-3.1-8B on one GPU: -0.22 %, +153.97 %, -3.47 %, -3.48 % of 58.11x."""
    found = llm_d_planner(question())
    assert percent(found.weights_gib, 14.99) == -0.22
    assert percent(found.activation_gib, 1.89) == 153.97
    assert percent(found.kv_gib, 58.11) == -3.47
    assert percent(found.concurrency, 58.11) == pytest.approx(-3.48, abs=0.011)
    assert found.request_gib == 1.0  # 2 x 32 x 8 x 128 x 2 bytes x 8192
    assert found.fits


def test_llm_d_planner_errs_as_it_published_on_two_ranks():
    """The same model with TP 2, 7.51 GiB each: -0.42 %; 0.6 GiB beside torch, and half the activation."""
    found = llm_d_planner(question(ranks=2, tensor=2))
    assert percent(found.weights_gib, 7.51) == -0.42
    assert found.kv_gib == pytest.approx(80 * 0.95 - LLAMA_BYTES / GIB / 2 - 4.8 / 2 - 0.6)


def test_llm_d_planner_takes_latent_attention_for_plain_unless_it_is_deepseeks():
    """Kimi-VL: 16 heads of 128 instead of a latent of 576, which its report counts as -87.31 %."""
    kimi = config(
        architectures=["KimiVLForConditionalGeneration"], num_hidden_layers=27, hidden_size=2048,
        num_attention_heads=16, num_key_value_heads=16, head_dim=None, kv_lora_rank=512,
        qk_rope_head_dim=64, num_experts_per_tok=6,
    )  # fmt: skip
    plain = llm_d_planner(question(config=kimi))
    latent = llm_d_planner(question(config={**kimi, "architectures": ["DeepseekV3ForCausalLM"]}))
    assert plain.request_gib == 2 * 27 * 16 * 128 * 2 * 8192 / GIB
    assert latent.request_gib == 27 * 576 * 2 * 8192 / GIB
    assert plain.activation_gib == 8.0


@pytest.mark.parametrize(
    "quantization, stored, weights",
    [
        # FP8 by the method's name, bf16 as stored
        ({"quant_method": "fp8"}, (("BF16", 10), ("F8_E4M3", 100)), 20 + 100),
        # compressed-tensors by the bits of its first group
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
            },
            (("BF16", 10), ("I8", 100)),
            20 + 100,
        ),
        # packed words are four bytes and stay four
        ({"quant_method": "gptq", "bits": 4}, (("I32", 100), ("BF16", 10)), 400 + 20),
        ({"quant_method": "mxfp4"}, (("U8", 100), ("BF16", 10)), 100 + 20),
    ],
)
def test_llm_d_planner_counts_bytes_by_type(quantization, stored, weights):
    """Types of two bytes and more as stored, smaller ones by the quantization."""
    asked = question(config=config(quantization_config=quantization), checkpoint=Checkpoint(stored))
    assert llm_d_planner(asked).weights_gib == pytest.approx(weights / GIB)


def test_llm_d_planner_does_not_answer_where_its_code_counts_nothing():
    """int(4 bits / 8) is 0 bytes: NVFP4 has no answer rather than a wrong one."""
    nvfp4 = config(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    found = llm_d_planner(question(config=nvfp4, checkpoint=Checkpoint((("U8", 100),))))
    assert found.weights_gib is None
    assert found.fits is None
    assert "modelopt" in found.silent


def test_llm_d_planner_says_nothing_of_a_gpu_or_length_that_is_not_known():
    """The weights have an answer, the cache that is left has none."""
    for unknown in ({"catalogue_gib": 0}, {"max_model_len": 0}):
        found = llm_d_planner(question(**unknown))
        assert found.weights_gib
        assert found.kv_gib is None
        assert found.fits is None


def test_llm_d_planner_refuses_what_leaves_no_request():
    """16 GiB: 15.2 less 14.96, 4.8 and 0.15 is nothing."""
    found = llm_d_planner(question(catalogue_gib=16))
    assert found.kv_gib == 0
    assert found.fits is False


# ── hf-mem ──────────────────────────────────────────────────────────────────────────────────────


def test_hf_mem_counts_all_layers_of_a_plain_model():
    """2 x 32 layers x 8192 tokens x 8 heads x 128 x 2 bytes: 1 GiB."""
    found = hf_mem(question())
    assert found.request_gib == 1.0
    assert found.weights_gib == LLAMA_BYTES / GIB
    assert found.kv_gib is None
    assert found.concurrency is None


def test_hf_mem_caps_windows_only_where_all_layers_slide():
    """Beside full layers, by `layer_types` or by the pattern, a window is taken to keep everything."""
    kinds = ["full_attention", "sliding_attention"] * 16
    by_kind = hf_mem(question(config=config(layer_types=kinds, sliding_window=1024)))
    by_pattern = hf_mem(question(config=config(sliding_window_pattern=2, sliding_window=1024)))
    alone = hf_mem(question(config=config(layer_types=["x"] * 32, sliding_window=1024)))
    assert by_kind.request_gib == by_pattern.request_gib == 1.0
    assert alone.request_gib == 1024 / 8192


@pytest.mark.parametrize(
    "kv_cache_dtype, quantization, stored, share",
    [
        ("fp8", None, "BF16", 0.5),
        ("bfloat16", None, "BF16", 1.0),
        ("auto", {"quant_method": "compressed-tensors"}, "F8_E4M3", 1.0),
        ("auto", {"quant_method": "fp8"}, "F8_E4M3", 0.5),  # takes FP8 weights for an FP8 cache
        ("auto", {"quant_method": "fp8"}, "BF16", None),
        ("auto", {"quant_method": "gptq"}, "I32", None),
        ("int8_per_token_head", None, "BF16", None),
    ],
)
def test_hf_mem_chooses_the_type_of_the_cache(kv_cache_dtype, quantization, stored, share):
    """By the flag, else by the checkpoint; some it refuses, and then only the weights are answered."""
    asked = question(
        config=config(quantization_config=quantization),
        kv_cache_dtype=kv_cache_dtype,
        checkpoint=Checkpoint(((stored, 100),)),
    )
    found = hf_mem(asked)
    assert found.request_gib == share
    assert bool(found.silent) == (share is None)
    assert found.weights_gib


def test_hf_mem_is_read_as_fitting_where_its_total_is_not_above_the_memory():
    """14.96 GiB and 1: in 16 GiB and not in 15.9; no GPU, no verdict."""
    assert hf_mem(question(total_gib=16.0)).fits
    assert hf_mem(question(total_gib=15.9)).fits is False
    assert hf_mem(question(total_gib=0.0)).fits is None


# ── gpustack ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "billions, gib",
    [(0.4940, 3.1), (7.6156, 19.0), (72.7062, 164.5)],
)
def test_gpustack_claims_what_its_docstring_says(billions, gib):
    """0.5B requires 3.1 GiB, 7B 19.0, 72B 164.5 (Qwen2.5 in bf16): files x 1.2 + 2 GiB."""
    stored = Checkpoint((("BF16", int(billions * 1e9)),))
    assert gpustack(question(checkpoint=stored, total_gib=gib + 0.1, utilization=1.0)).fits
    assert not gpustack(question(checkpoint=stored, total_gib=gib - 0.1, utilization=1.0)).fits


def test_gpustack_has_its_own_default_and_no_cache():
    """0.9 of the memory where no share is given, and nothing said of the KV cache."""
    need = (LLAMA_BYTES * 1.2 + 2 * GIB) / GIB
    assert gpustack(question(utilization=None, total_gib=need / 0.9 + 0.1)).fits
    assert not gpustack(question(utilization=None, total_gib=need / 0.9 - 0.1)).fits
    found = gpustack(question())
    assert (found.request_gib, found.kv_gib, found.concurrency) == (None, None, None)


# ── the comparison ──────────────────────────────────────────────────────────────────────────────


def judged(tmp_path, cases, *more):
    """Exit code and report of the benchmark."""
    paths = [tmp_path / name for name in ("cases.json", "configs.json", "out.json")]
    paths[0].write_text(json.dumps(cases))
    paths[1].write_text(json.dumps([{**LLAMA, "checkpoint_total_size_bytes": LLAMA_BYTES}]))
    code = main([str(paths[0]), "--configs", str(paths[1]), "--json", str(paths[2]), *more])
    return code, json.loads(paths[2].read_text())


def test_the_nearest_tool_passes_every_bar(tmp_path, capsys):
    """A start and a refusal: this planner is nearest in each figure, and the table has all tools."""
    code, report = judged(tmp_path, [STARTED, REFUSED], "--verbose")
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert len(report["bars"]) == 6
    assert all(bar["passed"] for bar in report["bars"])
    assert {row["tool"] for row in report["rows"]} == {OURS, *RIVALS}
    assert "worst +0.00 %" in shown
    for tool in RIVALS:
        assert tool in shown


def test_a_tool_that_comes_nearer_fails_the_bar(tmp_path):
    """With logged weights that are the files' bytes, which vLLM pads, the others are nearer: code 1."""
    code, report = judged(
        tmp_path, [{**STARTED, "weights_gib_per_gpu": LLAMA_BYTES / GIB}, REFUSED]
    )
    assert code == 1
    assert [bar["name"] for bar in report["bars"] if not bar["passed"]] == [
        "weights, mean error beside other tools"
    ]


def test_no_case_is_no_success(tmp_path):
    """Without any case that can be asked nothing was measured, and nothing passes."""
    code, report = judged(tmp_path, [{**STARTED, "model": "a/b", "config_key": None}])
    assert code == 1
    assert not any(bar["passed"] for bar in report["bars"])
    assert report["rows"] == [{"id": "started", "left_out": "the model's config is not at hand"}]


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"notes": "cpu offload"}, "offloaded"),
        ({"outcome": "error", "error": "Free memory on device cuda:0 (9.1/79.2 GiB)"}, "process"),
        ({"outcome": "error", "error": "unknown flag"}, "something else"),
        ({"quantization": "bitsandbytes"}, "checkpoint size"),
    ],
)
def test_what_nobody_can_know_is_asked_of_nobody(change, reason):
    """Offload, another process's memory, other errors, unknown formats: left out with the reason."""
    found = compare({**STARTED, **change}, LLAMA)
    assert reason in found.reason
    assert all(answer == Answer() for answer in found.answers.values())


def test_figures_that_a_log_does_not_pin_are_not_compared():
    """One stage's cache over the poorest stage's concurrency is no request; no length, no verdict."""
    assert logged_figures(STARTED).request_gib == 1.0
    assert logged_figures({**STARTED, "pp": 2}).request_gib is None
    assert logged_figures({**STARTED, "kv_cache_gib_per_gpu": -1.4}).kv_gib is None
    assert not logged_figures({**STARTED, "max_model_len": None}).started


@pytest.mark.parametrize("flags", [{"dtype": "float32"}, {"kv_cache_dtype": "fp8"},
                                   {"quantization": "fp8"}, {"url": "x"}])  # fmt: skip
def test_the_campaign_is_what_its_report_covers(flags):
    """Starts with flags that llm-d-planner does not take are not held against its published errors."""
    assert compare(STARTED, LLAMA).campaign
    assert not compare({**STARTED, **flags}, LLAMA).campaign


def compared(name, logged, **answers):
    """A case with weights of 10 and these answers."""
    return Compared(name, logged, answers, campaign=True)


def two_cases():
    """One that both tools answer, and one that is answered by `ours` alone, badly."""
    logged = Logged(weights_gib=10.0, started=True)
    return [
        compared("a", logged, ours=Answer(weights_gib=10.1), other=Answer(weights_gib=12.0)),
        compared("b", logged, ours=Answer(weights_gib=20.0), other=Answer()),
    ]


def test_the_same_cases_are_those_that_all_answer():
    """An answer that the other tool does not have counts on its own, not in the comparison."""
    cases = two_cases()
    assert score(cases, "ours", "weights_gib").mean == pytest.approx(50.5)
    assert [case.id for case in shared(cases, "weights_gib")] == ["a"]
    first = next(iter(bars(cases)))
    assert first.passed
    assert first.cases == 1
    line = next(
        line for line in error_table(cases) if line.startswith("weights") and "ours" in line
    )
    assert line.split()[2:] == ["2", "50.50", "50.50", "100.00", "1", "1.00", "1.00", "1.00"]


def test_wrong_verdicts_are_counted_both_ways():
    """`fits` on a refused start, `cannot fit` on one that ran; a wish to measure is neither."""
    refused = Logged(refused_for_memory=True)
    ran = Logged(started=True)
    cases = [
        compared("a", refused, ours=Answer(fits=False), other=Answer(fits=True)),
        compared("b", refused, ours=Answer(measure=True), other=Answer(fits=None)),
        compared("c", ran, ours=Answer(fits=True), other=Answer(fits=False)),
    ]
    table = verdict_table(cases)
    assert table[1].split() == [
        *("ours", "0", "of", "1", "refused"),
        *("0", "of", "1", "started", "1", "0"),
    ]
    assert table[2].split()[1:9] == ["1", "of", "1", "refused", "1", "of", "1", "started"]
    last = list(bars(cases))[-1]
    assert (last.passed, last.cases) == (True, 2)
    wrong = [*cases, compared("d", refused, ours=Answer(fits=True), other=Answer(fits=True))]
    assert not list(bars(wrong))[-1].passed


def test_published_errors_stand_beside_the_formula():
    """The table of the campaign has the published figure, the formula's and ours; none without cases."""
    table = campaign_table(two_cases(), {"weights_gib": 0.89}, "other")
    assert table[1].split() == ["weights", "1", "0.89", "20.00", "50.50"]
    assert campaign_table([], {"weights_gib": 0.89}, "other") == []


@pytest.mark.parametrize(
    "content", ["{", '[{"id": 1}]', '{"a": 1}', "[3]", json.dumps([{**STARTED, "tp": "x"}])]
)
def test_a_case_file_of_another_kind_is_refused(tmp_path, capsys, content):
    """Broken JSON, and JSON that is no list of cases, end with code 2 and a message."""
    path, configs = tmp_path / "cases.json", tmp_path / "configs.json"
    path.write_text(content)
    configs.write_text(json.dumps([LLAMA]))
    try:
        code = main([str(path), "--configs", str(configs)])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert "error:" in capsys.readouterr().err


# ── hf-mem itself ───────────────────────────────────────────────────────────────────────────────


class HubOfOne:
    """Stands for hf-mem: reads header and config as it does, and multiplies nothing."""

    class httpx2:  # noqa: N801
        """Its HTTP library."""

        AsyncClient = object

    def __init__(self, asked):
        self.asked = asked

    def run(self, name, *, experimental=False, **_):
        """Bytes of the tensors in the header; no cache for a checkpoint of GPTQ."""
        begin = respond(self.asked, "/x/model.safetensors")
        tensors = json.loads(begin[8 : 8 + int.from_bytes(begin[:8], "little")])
        size = sum(2 * entry["shape"][0] for entry in tensors.values())
        config = json.loads(respond(self.asked, "/x/config.json"))
        if experimental and config.get("quantization_config"):
            raise RuntimeError("not supported")
        return SimpleNamespace(memory=size, kv_cache=GIB)


def test_hf_mem_is_given_the_same_inputs():
    """The header that it reads holds the checkpoint's elements, and the config the model's fields."""
    asked = question()
    assert ask(HubOfOne(asked), asked) == Answer(weights_gib=LLAMA_BYTES / GIB, request_gib=1.0)
    packed = question(config=config(quantization_config={"quant_method": "gptq"}))
    assert ask(HubOfOne(packed), packed).request_gib is None
    assert [entry["path"] for entry in json.loads(respond(asked, "/api/tree/main"))] == [
        "model.safetensors",
        "config.json",
    ]


def test_without_hf_mem_nothing_is_claimed(monkeypatch, capsys):
    """Where the package is not installed the command ends with code 2 and says so."""
    monkeypatch.setitem(sys.modules, "hf_mem.run", None)
    assert planner_hf_mem.main(["cases.json", "--configs", "configs.json"]) == 2
    assert "hf-mem" in capsys.readouterr().err
