"""What is said of a promise that the hardware cannot keep?"""

from __future__ import annotations

import re

import pytest

from rayserve.errors import SpecError
from tests.unit.plan_of import plan


def test_a_token_too_fast_is_answered_for_one_sequence_and_for_many():
    """The least promise that one sequence alone keeps leaves room for few: both figures are told."""
    aim = "  aim: throughput\n"
    with pytest.raises(SpecError, match="needs at its peak") as caught:
        plan(aim + "  slo: {tpot_ms: 1}\n")
    told = re.search(r"tpot_ms: (\d+), .* alone, or (\d+), that of (\d+) at once", caught.value.do)
    assert told is not None
    alone, together, many = map(int, told.groups())
    assert alone < together

    def seqs(promised: int) -> int:
        made = plan(f"{aim}  slo: {{tpot_ms: {promised}}}\n")
        return int(made.replica.engine_arguments()["max_num_seqs"])

    assert 1 <= seqs(alone) < many
    assert seqs(together) >= many
