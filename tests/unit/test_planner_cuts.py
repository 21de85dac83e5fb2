"""Which ranks go with the stages that a person wrote, and what is told where none do?"""

from __future__ import annotations

import re

import pytest

from rayserve.errors import SpecError
from rayserve.planner.views.terminal import table
from tests.plans import planned
from tests.unit.architectures import DEEPSEEK
from tests.unit.test_planner_remedies import (
    LARGE,
    PACKED,
    SMALL,
    length,
    plan,
    refusal,
    surely,
    text,
)

MIDDLE = {
    **LARGE,
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
"""Llama 70B in 16 bits."""
SHORT = length(16384)


def stages(pipeline: int, tensor: object = "auto") -> str:
    """The sections of a short context and a cut."""
    return f"{SHORT}  parallelism: {{tensor: {tensor}, pipeline: {pipeline}}}\n"


def told(model, *where, **more) -> SpecError:
    """The refusal of a spec."""
    with pytest.raises(SpecError) as raised:
        plan(model, *where, **more)
    return raised.value


@pytest.mark.parametrize(
    "hosts, gpus, pipeline, tensor",
    [
        (1, 7, 7, 1), (1, 3, 3, 1), (1, 5, 5, 1), (1, 6, 3, 2), (1, 6, 5, 1), (1, 7, 5, 1),
        (1, 8, 3, 2), (1, 8, 2, 4), (2, 8, 2, 8), (2, 8, 3, 4), (2, 3, 6, 1),
    ],
)  # fmt: skip
def test_ranks_that_nobody_wrote_yield_to_written_stages(hosts, gpus, pipeline, tensor):
    """The largest size is taken of which the hosts hold so many stages, and the reason says so."""
    made = plan(MIDDLE, "A100-80GB-SXM", gpus, hosts, add=stages(pipeline))
    placement = made.replica.placement
    assert (placement.tensor_parallel_size, placement.pipeline_parallel_size) == (tensor, pipeline)
    reason = next(one.reason for one in made.choices if one.name == "parallelism.tensor")
    assert (f"goes with pipeline: {pipeline}" in reason) == ((hosts, pipeline) != (2, 2))


@pytest.mark.parametrize("tensor, pipeline", [(7, 7), (7, 1), (3, 3), (4, 5), (16, 3), (4, 2)])
def test_ranks_that_are_told_go_with_the_written_stages(tensor, pipeline):
    """Each size that a refusal on seven GPUs names makes a plan with those stages."""
    error = told(MIDDLE, "A100-80GB-SXM", 7, add=stages(pipeline, tensor))
    sizes = re.findall(r"\d+", error.do.replace("or more", ""))
    assert sizes
    for size in sizes:
        assert plan(MIDDLE, "A100-80GB-SXM", 7, add=stages(pipeline, size))


def test_fewer_stages_are_told_where_no_ranks_go_with_them():
    """Nine stages on a host of seven GPUs: seven at most, and seven make a plan."""
    error = told(MIDDLE, "A100-80GB-SXM", 7, add=stages(9))
    assert error.do == "write pipeline: 7 at most, or add hosts"
    assert plan(MIDDLE, "A100-80GB-SXM", 7, add=stages(7))


@pytest.mark.parametrize("parallelism", ["{pipeline: 1}", "{tensor: auto, pipeline: auto}"])
def test_a_refusal_is_that_of_the_cut_with_the_most_gpus(parallelism):
    """Where written stages leave the ranks to the plan, the length that is told plans with them."""
    where, cut = ("L40S-48GB", 4), f"  parallelism: {parallelism}\n"
    do = refusal(MIDDLE, *where, add=length(131072) + cut)
    found = [int(number) for number in re.findall(r"(\d{4,})", do)]
    assert do.startswith("write max_model_len: ")
    for tokens in found:
        made = plan(MIDDLE, *where, add=length(tokens) + cut)
        assert made.replica.placement.tensor_parallel_size == 4


# ── keys that must follow a shorter context ─────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "section, change, key",
    [
        ("  door: {max_tokens: 100000}\n", "100000", "door.max_tokens (100000)"),
        ("  workload: {prompt_tokens: 90000, output_tokens: 9000}\n", "90000", "99000 together"),
    ],
)
def test_a_length_to_write_names_the_keys_that_must_follow(section, change, key):
    """Who follows the whole remedy gets a plan; who leaves the other key gets another refusal."""
    do = refusal(SMALL, "L4-24GB", 1, add=length(131072) + section)
    assert key in do
    shorter = int(re.search(r"max_model_len: (\d+)", do)[1])
    told(SMALL, "L4-24GB", 1, add=length(shorter) + section)
    followed = section.replace(change, "1000").replace("9000}", "1000}")
    assert surely(plan(SMALL, "L4-24GB", 1, add=length(shorter) + followed))
    assert "no larger" not in refusal(SMALL, "L4-24GB", 1, add=length(131072) + followed)


# ── layers that guess ───────────────────────────────────────────────────────────────────────────

MIMO = {**SMALL, "architectures": ["MiMoForCausalLM"]}


def guessed(model, tokens: int = 1):
    """The plan of a model whose own layers guess so many tokens."""
    guess = f"  speculative: {{method: mtp, num_tokens: {tokens}}}\n"
    return planned(text("A100-80GB-SXM", 8, 2, add=guess), model)


@pytest.mark.parametrize("layers", [{}, {"num_nextn_predict_layers": 0}])
@pytest.mark.parametrize("model", [SMALL, PACKED, MIMO, DEEPSEEK])
def test_a_model_without_layers_that_guess_is_refused(model, layers):
    """vLLM takes no method mtp of another family, nor of one whose config.json counts no layer."""
    without = {key: value for key, value in model.items() if key != "num_nextn_predict_layers"}
    with pytest.raises(SpecError, match="a model with layers that guess"):
        guessed({**without, **layers})


def test_layers_that_guess_and_have_no_shapes_are_not_counted():
    """Of a family whose layers the planner has not, the plan says that they stand in no term."""
    made = guessed({**MIMO, "num_nextn_predict_layers": 1})
    assert any(note.startswith("Not counted: the layers that guess") for note in made.notes)
    assert "may fit" in table(made).splitlines()[0]


def test_guessed_tokens_are_a_multiple_of_the_layers():
    """vLLM repeats the layers as a whole: of two, four tokens are taken and three are not."""
    two = {**MIMO, "num_nextn_predict_layers": 2}
    assert guessed(two, 4)
    with pytest.raises(SpecError, match="write 2"):
        guessed(two, 3)
