"""Does the planner lay a model out as it must, and do its estimates agree with exact arithmetic?"""

from __future__ import annotations

import pytest

from rayserve.errors import DoesNotFitError, SpecError, Where
from rayserve.planner.catalogue import gpus, ray_labels
from rayserve.planner.memory.simple import Cut, kv_bytes_per_token, lora_bytes, weights_bytes
from rayserve.planner.profile import read_profile, scaled_bits
from rayserve.planner.views.terminal import table
from rayserve.planner.weights.architecture import read_architecture
from rayserve.planner.weights.tensors import stored_bytes
from rayserve.units import GIB
from tests.unit.plan_of import HERE, MODEL, config, plan


@pytest.mark.parametrize(
    "name, cut, gib",
    [
        ("llama-405b-w4a16", Cut(8, 1), 25.14),
        ("llama-405b", Cut(8, 1), 94.5),
        ("llama-70b", Cut(1, 1), 131.42),
    ],
)
def test_weights_are_near_a_count_of_the_tensors(name, cut, gib):
    """Weights of a rank agree within 0.5 % with a count of the tensors, which is no measurement."""
    profile = read_profile(config(name), HERE)
    assert weights_bytes(profile, cut, 0) / GIB == pytest.approx(gib, rel=0.005)


@pytest.mark.parametrize(
    "name, tensor, expected",
    [
        ("llama-405b", 1, 516096),
        ("llama-405b", 8, 64512),
        ("llama-70b", 4, 81920),
        ("qwen3-235b-fp8", 4, 48128),
        ("qwen3-235b-fp8", 8, 48128),
    ],
)
def test_kv_bytes_per_token(name, tensor, expected):
    """KV bytes a token and rank follow vLLM's page formula, copied heads included."""
    profile = read_profile(config(name), HERE)
    assert kv_bytes_per_token(profile, Cut(tensor, 1), "auto") == expected
    assert kv_bytes_per_token(profile, Cut(tensor, 1), "fp8") == expected // 2


def test_mla_cache_is_the_same_on_every_rank():
    """A latent cache is not cut by tensor parallelism."""
    profile = read_profile(config("deepseek-v3"), HERE)
    assert kv_bytes_per_token(profile, Cut(8, 1), "auto") == 61 * 576 * 2
    assert kv_bytes_per_token(profile, Cut(1, 1), "auto") == 61 * 576 * 2


def test_lora_slots_follow_from_the_layers():
    """Slots x rank x (in + out) of each linear layer; what tensor parallelism cuts is cut."""
    profile = read_profile(config("llama-70b"), HERE)
    hidden, kv, mlp = 8192, 1024, 28672
    linears = 4 * hidden + 2 * (hidden + kv) + 3 * (hidden + mlp)
    vocabulary = 2 * (hidden + 128256)
    whole = lora_bytes(profile, Cut(1, 1), slots=2, rank=16)
    assert whole == 2 * 16 * 2 * (80 * linears + vocabulary)
    cut = lora_bytes(profile, Cut(4, 1), slots=2, rank=16)
    assert whole / 4 < cut < whole
    assert lora_bytes(profile, Cut(1, 1), slots=0, rank=16) == 0


LORA = "  lora: {adapters: [{name: a, path: /srv/a}, {name: b, path: /srv/b}]}\n"
DRAFT = "  speculative: {method: draft_model, model: /srv/draft, num_tokens: 4"


def test_adapters_take_from_the_cache():
    """Slots for LoRA adapters are a term of the estimate, and the KV cache is smaller by it."""
    plain, adapted = plan().memory, plan(LORA).memory
    assert adapted.lora_bytes > 0 == plain.lora_bytes
    assert adapted.kv_bytes == plain.kv_bytes - adapted.lora_bytes


def test_a_draft_model_takes_from_the_cache():
    """Weights and KV cache of a draft model are counted from its own config.json."""
    plain = plan().memory
    drafted = plan(DRAFT + ", config: draft.json}\n", draft=config("llama-8b")).memory
    draft = read_profile(config("llama-8b"), HERE)
    assert drafted.draft_bytes == weights_bytes(draft, Cut(8, 1), 0)
    # and, since steps grow by the guessed tokens, graphs of more sizes
    assert drafted.kv_bytes < plain.kv_bytes - drafted.draft_bytes
    added = drafted.kv_bytes_per_token - plain.kv_bytes_per_token
    assert added == kv_bytes_per_token(draft, Cut(8, 1), "auto")
    assert drafted.uncounted == []


def test_a_draft_model_with_latent_attention_keeps_one_vector():
    """Its cache is the latent of each token, whole on every rank, not keys and values of heads."""
    latent = config("llama-8b") | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    plain = plan().memory
    drafted = plan(DRAFT + ", config: draft.json}\n", draft=latent).memory
    layers = latent["num_hidden_layers"]
    assert drafted.kv_bytes_per_token - plain.kv_bytes_per_token == layers * 576 * 2


def test_what_is_not_counted_is_said():
    """With a draft model of unknown size the plan does not say that it fits, and says why."""
    made = plan(DRAFT + "}\n")
    assert any(note.startswith("Not counted: ") for note in made.notes)
    assert "may fit" in table(made)
    assert " fits" not in table(made).splitlines()[0]
    assert table(plan()).splitlines()[0].endswith(" fits")


def test_a_draft_model_of_an_id_is_loaded_at_its_commit_and_not_offline():
    """vLLM gets the revision, and may fetch the draft model even where the model is a folder."""
    made = plan(
        "  speculative: {method: draft_model, model: a/draft, num_tokens: 4, revision: abc}\n",
        draft=config("llama-8b"),
    )
    guess = made.replica.engine_arguments()["speculative_config"]
    assert (guess["model"], guess["revision"]) == ("a/draft", "abc")
    assert made.memory.uncounted == []
    assert made.replica.model_source == "path"
    offline = {item.name: item.value for item in made.replica.env}["HF_HUB_OFFLINE"]
    assert offline == "0"
    beside = {item.name: item.value for item in plan(DRAFT + "}\n").replica.env}["HF_HUB_OFFLINE"]
    assert beside == "1"


def test_ngram_guesses_without_memory():
    """A guess from the prompt takes no weights, and leaves nothing uncounted."""
    assert plan("  speculative: {method: ngram, num_tokens: 4}\n").memory.uncounted == []


@pytest.mark.parametrize(
    "add, mode",
    [
        ("", "interactivity"),
        ("  engine_args: {performance_mode: balanced}\n", "balanced"),
        ("  engine_args: {cudagraph_capture_sizes: [1, 2]}\n", None),
        ("  engine_args: {compilation_config: {cudagraph_capture_sizes: [1, 2]}}\n", None),
        ("  scheduling: {cuda_graphs: false}\n", None),
        ("  aim: throughput\n", None),
    ],
)
def test_graphs_of_every_small_batch(add, mode):
    """For latency a GPU records a graph for each small batch, unless a person says which; set once."""
    names = [item.name for item in plan(add).replica.engine_args]
    assert names.count("performance_mode") == (mode is not None)
    assert plan(add).replica.engine_arguments().get("performance_mode") == mode


def test_the_content_of_small_files_is_in_the_revision():
    """Another chat template is another revision; one that could not be read is told in a note."""
    add = "  chat: {template_file: /srv/chat.jinja}\n"
    one, two = (plan(add, digests={"/srv/chat.jinja": digit * 64}) for digit in "12")
    assert one.revision != two.revision
    assert [item.name for item in one.replica.content] == ["/srv/chat.jinja"]
    assert not any("/srv/chat.jinja" in note for note in one.notes)
    blind = plan(add)
    assert blind.replica.content == []
    assert any("/srv/chat.jinja" in note for note in blind.notes)


@pytest.mark.parametrize("swap, source", [("path: /srv/models/m", "path"), ("hf_id: a/b", "hub")])
def test_a_plan_says_where_the_model_is(swap, source):
    """A folder and an id are told apart by the spec's key, not by their looks."""
    add = "" if source == "path" else f"    revision: {'a' * 40}\n"
    made = plan(**{"path: /srv/models/m": swap + "\n" + add if add else swap})
    assert made.replica.model_source == source


def test_a_checkpoint_size_replaces_the_shapes():
    """With a given size the ranks share exactly that, no less."""
    profile = read_profile(config("llama-70b"), HERE)
    share = weights_bytes(profile, Cut(4, 1), 141_107_412_992)
    assert share == pytest.approx(141_107_412_992 / 4, rel=0.005)
    assert share >= 141_107_412_992 // 4


def test_the_example_leaves_the_computed_cache():
    """405B W4A16 on eight A100-80GB: 25.14 GiB of weights, and 64,512 bytes of cache a token."""
    memory = plan().memory
    assert memory.model == "exact"
    assert memory.weights_bytes / GIB == pytest.approx(25.14, rel=0.001)
    assert memory.kv_bytes_per_token == 64_512
    assert memory.kv_low_bytes < memory.kv_bytes < memory.kv_high_bytes
    assert memory.kv_tokens == pytest.approx(memory.kv_bytes / 64_512, abs=16384 / 100)
    assert not any("simple estimate" in note for note in plan().notes)


GROUPS = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}


def test_a_group_of_weights_is_not_cut_in_two():
    """A rank must hold whole groups of a quantized MLP; `auto` takes a size that does."""
    odd = {**MODEL, "intermediate_size": 231 * 128, "num_hidden_layers": 8,
           "quantization_config": GROUPS}  # fmt: skip
    with pytest.raises(SpecError, match="whole groups of 128"):
        plan("  parallelism: {tensor: 8}\n", model=odd)
    assert plan(model=odd).replica.placement.tensor_parallel_size == 1


def test_what_the_chip_does_instead_is_said():
    """An A100 expands 4-bit weights and computes in 16 bits."""
    assert any("16-bit compute" in note for note in plan().notes)


def test_experts_as_a_whole_take_more_room_to_compute():
    """Expert parallelism, which `engine_args` switches on, changes the memory of a step."""
    mixtral = {**MODEL, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8,
               "num_experts_per_tok": 2, "quantization_config": None, "num_hidden_layers": 8}  # fmt: skip
    sliced = plan(model=mixtral).memory
    whole = plan("  engine_args: {enable_expert_parallel: true}\n", model=mixtral).memory
    assert whole.activation_bytes > sliced.activation_bytes


def test_an_argument_that_no_term_follows_is_said():
    """With memory that the planner does not model, it does not say that it fits."""
    made = plan("  engine_args: {enable_dbo: true}\n")
    assert "may fit" in table(made).splitlines()[0]
    assert any("engine_args.enable_dbo" in note for note in made.notes)


def test_a_key_that_is_not_used_is_said():
    """`checkpoint_bytes` and `weight_bits` help only where the architecture is not known."""
    made = plan("  precision: {weight_bits: 4}\n")
    assert any(note.startswith("precision.weight_bits is not used") for note in made.notes)


def test_no_images_no_tower():
    """With no image allowed, which is the default, vLLM builds no vision tower, and none is counted."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
            "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window": 1024}  # fmt: skip
    gemma = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    seen = {"max_model_len: 16384": "max_model_len: 16384\n    max_images: 1"}
    blind, seeing = plan(model=gemma), plan(model=gemma, **seen)
    assert blind.memory.weights_bytes < seeing.memory.weights_bytes


UNKNOWN = {**MODEL, "architectures": ["ArceeForCausalLM"]}
"""Served by the pinned vLLM, and not laid out by the planner."""


def test_an_unknown_architecture_is_bounded_by_its_sum():
    """The sum of the weights is exact; a rank holds at least an even share and at most all of it."""
    size = 230 * GIB
    made = plan(model=UNKNOWN, checkpoint={"U8": size})
    memory = made.memory
    assert memory.model == "simple"
    weights = next(term for term in memory.terms if term.name == "weights")
    assert (weights.low_bytes, weights.high_bytes) == (size // 8, size)
    assert size // 8 <= weights.expected_bytes < size // 7
    assert memory.verdict == "within the uncertainty: measure"
    assert memory.kv_low_bytes < memory.kv_bytes < memory.kv_high_bytes
    assert any("does not know this architecture" in note for note in made.notes)
    assert any("--load-format dummy" in note for note in made.notes)
    assert [(item.name, item.value) for item in made.checkpoint] == [("U8", size)]


def test_an_unknown_format_of_an_unknown_model_is_judged_by_its_name():
    """A method that the pinned vLLM does not load is refused, whether or not the layers are known."""
    packed = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(SpecError, match="bitsandbytes"):
        plan(model={**UNKNOWN, "quantization_config": packed}, checkpoint={"U8": 230 * GIB})


def test_a_method_that_config_json_denies_is_refused():
    """vLLM stops there; the plan used to leave the argument out of its sum and pass it on."""
    packed = {**MODEL, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    with pytest.raises(SpecError, match="own method") as refused:
        plan("  precision: {quantization: fp8}\n", model=packed)
    assert "auto" in refused.value.do


def test_an_unknown_architecture_on_one_gpu_has_exact_weights():
    """Where nothing is cut, nothing is uncertain about the weights."""
    small = {**UNKNOWN, "quantization_config": None, "num_hidden_layers": 8}
    made = plan("  parallelism: {tensor: 1}\n", model=small, checkpoint={"BF16": 20 * GIB})
    weights = next(term for term in made.memory.terms if term.name == "weights")
    assert weights.low_bytes == weights.high_bytes == 20 * GIB
    assert made.memory.verdict.startswith("fits")


def test_an_unknown_architecture_that_cannot_fit_is_refused():
    """An even share that is more than a GPU holds is proof enough."""
    with pytest.raises(DoesNotFitError, match="of weights at least"):
        plan(model=UNKNOWN, checkpoint={"U8": 1400 * GIB})


def test_weights_stored_in_32_bits_take_half_when_loaded():
    """vLLM computes in 16 bits unless it is told otherwise; a quantized checkpoint keeps its types."""
    small = {**UNKNOWN, "quantization_config": None, "num_hidden_layers": 8}
    one = "  parallelism: {tensor: 1}\n"
    half = plan(one, model=small, checkpoint={"F32": 40 * GIB})
    assert half.memory.weights_bytes == 20 * GIB
    whole = plan(one, model={**UNKNOWN, "num_hidden_layers": 8}, checkpoint={"F32": 20 * GIB})
    assert whole.memory.weights_bytes == 20 * GIB


def test_a_told_size_that_the_files_deny_is_refused():
    """The headers are the truth, and the message names their sum."""
    told = {"config: config.json": "config: config.json\n    checkpoint_bytes: 7"}
    with pytest.raises(SpecError, match="write checkpoint_bytes: 8") as caught:
        plan(model=UNKNOWN, checkpoint={"BF16": 8}, **told)
    assert caught.value.where.key.endswith("checkpoint_bytes")


def test_files_that_do_not_belong_to_config_json_are_told():
    """Of a known architecture the sum of the files is compared with its tensors before any cut."""
    model = {**MODEL, "quantization_config": None, "num_hidden_layers": 4}
    sound = stored_bytes(read_architecture(model, Where("config.json")), draft=False, vision=False)
    for factor, told in ((1, False), (1.005, False), (1.03, True), (0.5, True)):
        made = plan(model=model, checkpoint={"BF16": int(sound * factor)})
        assert any("do not belong together" in note for note in made.notes) is told


def test_a_model_that_vllm_runs_with_other_code_is_told():
    """vLLM's backend for the code of Transformers is named where it serves the model."""
    model = {**MODEL, "architectures": ["BitNetForCausalLM"], "quantization_config": None}
    made = plan(model={**model, "num_hidden_layers": 8}, checkpoint={"BF16": 20 * GIB})
    assert any("model_impl: transformers" in note for note in made.notes)


@pytest.mark.parametrize("bits, group, expected", [(4, 128, 4.125), (8, 0, 8), (4, 32, 4.5)])
def test_scales_count(bits, group, expected):
    """A group's 16-bit scale is spread over its weights."""
    assert scaled_bits(bits, group) == expected


@pytest.mark.parametrize(
    "quantization, bits",
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.125),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "mxfp4"}, 4),
        (None, 16),
    ],
)
def test_bits_come_from_the_checkpoint(quantization, bits):
    """The bits of a weight are what config.json says of its quantization."""
    profile = read_profile({**config("llama-70b"), "quantization_config": quantization}, HERE)
    assert profile.weight_bits == bits


def test_every_catalogue_gpu_has_a_label_that_ray_knows():
    """No label of the catalogue is one that Ray never puts on a node by itself."""
    for gpu in gpus().values():
        assert ray_labels().get(gpu.label, "") == ""
