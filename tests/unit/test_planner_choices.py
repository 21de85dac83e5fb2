"""Does the planner choose cut, length and limits, and say why?"""

from __future__ import annotations

import pytest

from rayserve.errors import RayserveError, SpecError
from rayserve.planner.views.terminal import table
from tests.unit.plan_of import MODEL, config, plan


def test_auto_is_a_whole_host():
    """Without a wish a replica takes all GPUs of a host, and one host when that holds it."""
    placement = plan().replica.placement
    assert (placement.tensor_parallel_size, placement.pipeline_parallel_size) == (8, 1)


def test_auto_takes_as_few_hosts_as_hold_the_weights():
    """16-bit weights of 405B need two hosts: two stages, one-GPU bundles, Ray's executor."""
    model = {k: v for k, v in MODEL.items() if k != "quantization_config"}
    placement = plan(model=model).replica.placement
    assert (placement.tensor_parallel_size, placement.pipeline_parallel_size) == (8, 2)
    assert placement.executor == "ray"
    assert [bundle["GPU"] for bundle in placement.bundles] == [1.0] * 16


def test_two_stages_on_one_host_are_one_bundle():
    """TP 4 x PP 2 fits a host, so it is one gang of child processes."""
    placement = plan("  parallelism: {tensor: 4, pipeline: 2}\n").replica.placement
    assert placement.executor == "mp"
    assert [bundle["GPU"] for bundle in placement.bundles] == [8.0]


def test_auto_skips_ranks_that_do_not_divide():
    """On a host of six GPUs a model of 128 heads takes four, and the plan says that two idle."""
    made = plan(**{"gpus_per_host: 8": "gpus_per_host: 6"})
    assert made.replica.placement.tensor_parallel_size == 4
    assert any(note.startswith("8 of 12 GPUs of pool gpu stay unused") for note in made.notes)


@pytest.mark.parametrize("hosts, tensor, most", [(2, 8, 2), (2, 4, 4), (1, 2, 4)])
def test_gangs_bound_the_replicas(hosts, tensor, most):
    """replicas.max may be as many as whole gangs, and not one more."""
    model = config("llama-70b") if tensor == 2 else MODEL
    add = f"  parallelism: {{tensor: {tensor}}}\n  replicas: {{max: {most}}}\n"
    swaps = {"hosts: 2": f"hosts: {hosts}"}
    assert plan(add, model, **swaps).scaling.max_replicas == most
    with pytest.raises(RayserveError, match=f"write max: {most}"):
        plan(add.replace(f"max: {most}", f"max: {most + 1}"), model, **swaps)


def test_reasons_stand_where_the_planner_chose():
    """A chosen value says why; a written one says nothing."""
    items = {item.name: item for item in plan().replica.engine_args}
    assert items["max_model_len"].reason == ""
    assert "latency first" in items["max_num_seqs"].reason
    assert items["max_num_batched_tokens"].value == 2048
    assert "A100-80GB-SXM" in items["max_num_batched_tokens"].reason


def test_auto_length_leaves_room_for_several_sequences():
    """An auto max_model_len is halved until eight full sequences fit."""
    made = plan(**{"max_model_len: 16384": "max_model_len: auto"})
    assert made.replica.engine_arguments()["max_model_len"] == 65536
    assert made.memory.max_concurrency >= 8


def test_whole_prompts_without_chunks():
    """With chunked prefill off, an auto step grows to the longest prompt."""
    args = plan("  scheduling: {chunked_prefill: false}\n").replica.engine_arguments()
    assert args["max_num_batched_tokens"] == args["max_model_len"] == 16384


def test_a_tight_fit_is_said():
    """Within the uncertainty the plan stands, and names the command that measures."""
    one_stage = "  parallelism: {tensor: 8, pipeline: 1}\n"
    length = "max_model_len: 16384\n    gpu_memory_utilization: 0.35"
    tight = plan(one_stage, **{"max_model_len: 16384": length})
    assert tight.memory.kv_low_bytes < 16384 * 64_512 < tight.memory.kv_high_bytes
    assert table(tight).splitlines()[0].endswith("within the uncertainty: measure")
    assert any("vllm serve" in note and "--load-format dummy" in note for note in tight.notes)
    assert not any("--load-format dummy" in note for note in plan().notes)


def test_long_streams_are_told():
    """Where a promised answer outlasts the drain limit, the plan says so."""
    notes = plan("  slo: {tpot_ms: 60}\n").notes
    assert any("983 s" in note and "drain_s (600)" in note for note in notes)


@pytest.mark.parametrize(
    "image_config",
    [{"architectures": ["Mistral3ForConditionalGeneration"], "text_config": MODEL}],
)
def test_images_are_limited(image_config):
    """A multimodal model gets an explicit limit of images, none by default."""
    args = plan(model=image_config).replica.engine_arguments()
    assert args["limit_mm_per_prompt"] == {"image": 0, "video": 0, "audio": 0}


SEES = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": MODEL}


@pytest.mark.parametrize("switch, images", [("false", 2), ("true", 0)])
def test_the_switch_of_text_alone_is_taken(switch, images):
    """`language_model_only` stands beside the number of images that it agrees with."""
    limit = {"max_model_len: 16384": f"max_model_len: 16384\n    max_images: {images}"}
    made = plan(f"  engine_args: {{language_model_only: {switch}}}\n", model=SEES, **limit)
    assert made.replica.engine_arguments()["limit_mm_per_prompt"]["image"] == images


def test_images_beside_an_engine_for_text_are_refused():
    """`language_model_only` sets every limit to 0, so a number of images beside it is refused."""
    limit = {"max_model_len: 16384": "max_model_len: 16384\n    max_images: 2"}
    with pytest.raises(SpecError) as caught:
        plan("  engine_args: {language_model_only: true}\n", model=SEES, **limit)
    assert "max_images: 2" in caught.value.found
    assert caught.value.do == "remove language_model_only, or max_images"
    assert caught.value.where is not None
    assert caught.value.where.key == "rayserve_cluster.engine_args.language_model_only"
