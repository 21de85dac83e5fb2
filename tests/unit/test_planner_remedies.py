"""Does what a refusal or a note tells people to write hold when they write it?"""

from __future__ import annotations

import json
import re

import pytest

from rayserve.errors import DoesNotFitError
from rayserve.plan import Plan
from rayserve.planner import settled
from rayserve.planner.aims import largest
from rayserve.planner.memory.simple import Cut
from rayserve.planner.placement import cuts
from rayserve.planner.settled import settle
from rayserve.planner.views.terminal import table
from rayserve.spec import parse_spec
from tests.bad_specs import ROOT
from tests.plans import planned
from tests.unit.test_planner_weights import GPT_OSS_120B

CONFIGS = ROOT / "tests" / "golden" / "configs"
SMALL = json.loads((CONFIGS / "llama-8b.json").read_text())
LARGE = json.loads((CONFIGS / "llama-405b.json").read_text())
PACKED = json.loads((CONFIGS / "llama-405b-w4a16.json").read_text())
GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "torch_dtype": "bfloat16",
    "text_config": {
        "num_hidden_layers": 62,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "intermediate_size": 21504,
        "vocab_size": 262208,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 256,
}
"""Gemma 3 27B."""
KIMI = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "intermediate_size": 18432,
    "vocab_size": 163840,
    "n_routed_experts": 384,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"group_size": 32, "num_bits": 4, "strategy": "group", "type": "int"},
            }
        },
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
    },
}
"""Kimi K2 as W4A16, whose weights fill eight A100."""
INT4 = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
}
FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
        }
    },
    "ignore": ["lm_head", "re:vision_tower.*", "re:multi_modal_projector.*"],
}


def text(gpu: str, gpus: int, hosts: int = 1, add: str = "") -> str:
    """A spec for so many GPUs, with sections added."""
    return f"""rayserve_cluster:
  name: test
  node_pools:
    - {{name: gpu, hosts: {hosts}, gpu: {gpu}, gpus_per_host: {gpus}}}
  model: {{path: /srv/models/m, served_name: chat, config: config.json}}
  endpoint: {{host: 0.0.0.0, api_key_file: /etc/rayserve/api_keys}}
{add}"""


def plan(model, *where, **more) -> Plan:
    """The plan of a model on such GPUs."""
    return planned(text(*where, **more), model)


def refusal(model, *where, **more) -> str:
    """What the refusal of such a plan says to do."""
    with pytest.raises(DoesNotFitError) as raised:
        plan(model, *where, **more)
    return raised.value.do


def value(made: Plan, name: str):
    """An engine argument's value."""
    return made.replica.engine_arguments()[name]


def length(tokens: int) -> str:
    """The section that asks for a context."""
    return f"  limits: {{max_model_len: {tokens}}}\n"


def surely(made: Plan) -> bool:
    """Whether the plan says that it fits."""
    return made.memory.verdict.startswith("fits")


# ── steps and sequences ─────────────────────────────────────────────────────────────────────────


WRITTEN = re.compile(r"write (\w+): (\d+)(?:, which is sure to fit, or (\d+) at the very best)?")


@pytest.mark.parametrize(
    "section, key, number",
    [
        ("limits", "max_num_batched_tokens", 131072),
        ("limits", "max_num_batched_tokens", 2_000_000),
        ("limits", "max_num_seqs", 1_000_000),
        ("engine_args", "block_size", 1_000_000),
        ("engine_args", "block_size", 10**15 // 16 * 16),
    ],
)
def test_a_written_number_that_takes_the_memory_is_the_one_to_change(section, key, number):
    """405B on two hosts plans with its own choice, so the number is told, by its key, and both plan."""
    where = ("A100-80GB-SXM", 8, 2)
    with pytest.raises(DoesNotFitError) as raised:
        plan(LARGE, *where, add=f"  {section}: {{{key}: {number}}}\n")
    assert raised.value.where.key.endswith(f"{section}.{key}")
    found = WRITTEN.match(raised.value.do)
    assert found
    assert found[1] == key
    assert int(found[2]) < int(found[3]) < number
    assert surely(plan(LARGE, *where, add=f"  {section}: {{{key}: {found[2]}}}\n"))
    assert not surely(plan(LARGE, *where, add=f"  {section}: {{{key}: {found[3]}}}\n"))


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("written", [8192, 131072])
def test_a_refused_step_names_the_largest_that_holds(name, written):
    """The first value fits, the second may, and one more is refused as the written one was."""
    limits = f"  limits: {{max_model_len: 2048, {name}: %d}}\n"
    if name == "max_num_batched_tokens":
        written *= 8
    do = refusal(SMALL, "L4-24GB", 1, add=limits % written)
    sure, best = map(int, re.findall(rf"(?:write {name}: |, or )(\d+)", do))
    assert 1 < sure < best < written
    assert surely(plan(SMALL, "L4-24GB", 1, add=limits % sure))
    assert not surely(plan(SMALL, "L4-24GB", 1, add=limits % (sure + 1)))
    assert not surely(plan(SMALL, "L4-24GB", 1, add=limits % best))
    assert refusal(SMALL, "L4-24GB", 1, add=limits % (best + 1))


@pytest.mark.parametrize(
    "model, where", [(KIMI, ("A100-80GB-SXM", 8)), (GEMMA, ("RTX-3090-24GB", 3))]
)
def test_sequences_are_as_many_as_the_cache_beside_them_holds(model, where):
    """In a tight case too: as many as expected requests, to less than one."""
    made = plan(model, *where)
    seqs = value(made, "max_num_seqs")
    assert seqs > 1
    assert seqs <= made.memory.expected_concurrency < seqs + 1


@pytest.mark.parametrize("limit", range(8))
def test_the_largest_that_works_is_found(limit):
    """Of 1 to 5 the largest up to a limit, and 0 where not even 1 works."""
    assert largest(lambda count: count <= limit, 1, 5) == min(limit, 5)


# ── other checkpoints and more GPUs ─────────────────────────────────────────────────────────────


def test_fewer_bits_are_told_only_where_they_fit():
    """Gemma 27B on one GPU of 24 GB: 4 bits fit, 8 do not, and 4 GPUs hold it as it is."""
    do = refusal(GEMMA, "RTX-3090-24GB", 1)
    assert "checkpoint of 4 bits" in do
    assert surely(plan({**GEMMA, "quantization_config": INT4}, "RTX-3090-24GB", 1))
    assert refusal({**GEMMA, "quantization_config": FP8}, "RTX-3090-24GB", 1)
    assert "take 4 such GPUs on a host, with parallelism: {tensor: 1, pipeline: 4}" in do


@pytest.mark.parametrize(
    "model, where, add",
    [
        (GEMMA, ("RTX-3090-24GB", 1), ""),
        (GEMMA, ("RTX-3090-24GB", 1), "  limits: {max_model_len: 65536}\n"),
        (GEMMA, ("RTX-3090-24GB", 1), "  parallelism: {tensor: 1, pipeline: 1}\n"),
        (LARGE, ("A100-80GB-SXM", 8), ""),
        (LARGE, ("A100-80GB-SXM", 8, 2), "  replicas: {max: 2}\n  parallelism: {pipeline: 1}\n"),
        (LARGE, ("A100-80GB-SXM", 4), "  replicas: {max: 2}\n"),
        (PACKED, ("A100-80GB-SXM", 2), ""),
        (PACKED, ("RTX-4090-24GB", 1, 2), ""),
        (KIMI, ("H200-141GB-SXM", 2), ""),
        (GPT_OSS_120B, ("L40S-48GB", 1), ""),
    ],
)
def test_more_gpus_that_are_told_hold_a_plan_when_they_are_taken(model, where, add):
    """With the cut that is named, which `auto` chooses or the remedy says to write; else it is no help."""
    do = refusal(model, *where, add=add)
    found = re.search(
        r"take (\d+) such (GPUs on a host|hosts)(?: \(tensor (\d+) x pipeline (\d+)\)|"
        r", with (parallelism: \{tensor: (\d+), pipeline: (\d+)\}))(, where only)?",
        do,
    )
    assert found is not None, do
    count, what = int(found[1]), found[2]
    there = (where[0], where[1], count) if what == "hosts" else (where[0], count)
    if found[5]:
        add = re.sub(r"  parallelism: .*\n", "", add) + f"  {found[5]}\n"
    made = plan(model, *there, add=add)
    cut = (
        made.replica.placement.tensor_parallel_size,
        made.replica.placement.pipeline_parallel_size,
    )
    assert cut == (int(found[3] or found[6]), int(found[4] or found[7]))
    assert surely(made) is not bool(found[8])


def test_more_hosts_are_told_by_their_number():
    """405B in 16 bits on one host of eight A100: 8 bits, or two hosts, both of which then fit."""
    do = refusal(LARGE, "A100-80GB-SXM", 8)
    assert "checkpoint of 8 bits" in do
    assert "take 2 such hosts (tensor 8 x pipeline 2)" in do
    assert surely(plan({**LARGE, "quantization_config": FP8}, "A100-80GB-SXM", 8))
    assert surely(plan(LARGE, "A100-80GB-SXM", 8, 2))


def test_more_gpus_of_a_host_are_told_by_their_number():
    """gpt-oss-120b on one L40S: its 4 bits stay, and two GPUs hold it."""
    assert refusal(GPT_OSS_120B, "L40S-48GB", 1) == (
        "take 2 such GPUs on a host (tensor 2 x pipeline 1)"
    )
    assert surely(plan(GPT_OSS_120B, "L40S-48GB", 2))


@pytest.mark.parametrize("hosts, gpus", [(1, 1), (1, 4), (2, 4), (1, 8)])
def test_a_refusal_makes_few_plans(monkeypatch, hosts, gpus):
    """A plan takes a tenth of a second: a refusal that looks for more GPUs makes three at most."""
    made = []

    def counted(*args, **options):
        made.append(args)
        return settle(*args, **options)

    monkeypatch.setattr(settled, "settle", counted)
    assert "such hosts" in refusal(PACKED, "RTX-4090-24GB", gpus, hosts)
    assert 1 <= len(made) <= 3


def test_more_gpus_of_a_host_come_before_more_hosts():
    """405B in 4 bits on two A100 of a host: four of one host, not two such hosts."""
    do = refusal(PACKED, "A100-80GB-SXM", 2, add="  limits: {max_model_len: 16384}\n")
    assert do.startswith("take 4 such GPUs on a host")
    assert plan(PACKED, "A100-80GB-SXM", 4, add="  limits: {max_model_len: 16384}\n")


def test_what_the_pool_has_comes_first():
    """A cut or a share of the GPU that holds is told alone, and holds when it is written."""
    one = "  parallelism: {pipeline: 1}\n"
    do = refusal(LARGE, "A100-80GB-SXM", 8, 2, add=one)
    assert do == "write parallelism: {tensor: 8, pipeline: 2}"
    low = "  limits: {gpu_memory_utilization: 0.3}\n"
    assert refusal(PACKED, "A100-80GB-SXM", 8, add=low) == "write gpu_memory_utilization: 0.92"


def test_a_fixed_cache_is_no_answer_where_what_is_left_does_not_do_either():
    """`auto` is told alone where it plans, and with what else is needed where it does not."""
    pinned = "  limits: {kv_cache_gib: 40}\n"
    assert refusal(SMALL, "L4-24GB", 1, add=pinned) == "write kv_cache_gib: auto"
    assert plan(SMALL, "L4-24GB", 1).memory
    do = refusal(LARGE, "A100-80GB-SXM", 8, add=pinned)
    assert do == f"write kv_cache_gib: auto, and {refusal(LARGE, 'A100-80GB-SXM', 8)}"


def test_it_is_said_where_nothing_holds():
    """405B on one GPU of 24 GB a host: no bits and no number of hosts that anybody has."""
    assert refusal(PACKED, "RTX-4090-24GB", 1, 2).startswith("take 15 such hosts")
    assert refusal(LARGE, "L4-24GB", 1).startswith("take a smaller model or larger GPUs")


# ── cuts ────────────────────────────────────────────────────────────────────────────────────────


def test_stages_reach_gpus_that_ranks_leave_idle():
    """Of three GPUs a tensor of 2 leaves one idle: where that does not hold, three stages are cut."""
    made = plan(GEMMA, "RTX-3090-24GB", 3)
    placement = made.replica.placement
    assert (placement.tensor_parallel_size, placement.pipeline_parallel_size) == (1, 3)
    assert placement.strategy == "STRICT_PACK"
    reasons = {item.name: item.reason for item in made.choices}
    assert "leave GPUs idle" in reasons["parallelism.tensor"]
    assert "3 GPUs" in reasons["parallelism.pipeline"]


@pytest.mark.parametrize(
    "hosts, gpus, sizes, expected",
    [
        (1, 8, (1, 2, 4, 8), [(8, 1)]),
        (2, 8, (1, 2, 4, 8), [(8, 1), (8, 2)]),
        (1, 3, (1, 2), [(2, 1), (1, 3)]),
        (2, 8, (1, 2, 4), [(4, 1), (4, 2), (4, 3), (4, 4)]),
        (2, 3, (1, 2), [(2, 1), (1, 3), (1, 4), (1, 5), (1, 6)]),
        (1, 6, (1, 2, 4), [(4, 1), (2, 3)]),
    ],
)
def test_cuts_prefer_ranks_and_one_host(hosts, gpus, sizes, expected):
    """More ranks before more stages, one host before two, fewer ranks only for idle GPUs."""
    assert list(cuts(hosts, gpus, sizes, 62)) == [Cut(*cut) for cut in expected]


# ── what nobody chose ───────────────────────────────────────────────────────────────────────────


def test_a_share_that_nobody_wrote_is_no_wish_of_the_spec():
    """It is vLLM's own default and says so; one that is written has no reason of ours."""
    arguments = json.loads((ROOT / "rayserve/data/vllm-0.32.0-args.json").read_text())["engine"]
    limits = parse_spec(text("L4-24GB", 1), "cluster.yml").limits
    assert arguments["gpu_memory_utilization"]["default"] == limits.gpu_memory_utilization
    made = plan(SMALL, "L4-24GB", 1)
    written = plan(SMALL, "L4-24GB", 1, add="  limits: {gpu_memory_utilization: 0.92}\n")
    assert "default: gpu_memory_utilization 0.92" in table(made)
    assert "written: gpu_memory_utilization 0.92" in table(written)
    reasons = [
        item.reason
        for one in (made, written)
        for item in one.replica.engine_args
        if item.name == "gpu_memory_utilization"
    ]
    assert reasons[0].startswith("vLLM's own default")
    assert reasons[1] == ""


@pytest.mark.parametrize("prompt, steps", [(1024, "takes one step"), (5000, "takes 3 steps")])
def test_a_step_for_throughput_has_a_reason_of_its_own(prompt, steps):
    """It tells how many steps the expected prompt takes, not how long answers pause."""
    add = f"  aim: throughput\n  workload: {{prompt_tokens: {prompt}, output_tokens: 100}}\n"
    made = plan(SMALL, "A100-80GB-SXM", 8, add=add)
    step = next(one for one in made.replica.engine_args if one.name == "max_num_batched_tokens")
    assert step.reason.startswith("throughput first: ")
    assert step.reason.endswith(steps)
