"""Which real starts count for a plan, what do they change in it, and how long will a start take?"""

from __future__ import annotations

import json
import re

import pytest

from rayserve import inventory, planning
from rayserve.errors import DoesNotFitError
from rayserve.planner.catalogue import gpus, same_gpu
from rayserve.planner.evidence import budget_notes, difference, start_estimate
from rayserve.planner.views.terminal import table
from tests.golden_specs import GOLDEN, plan_of
from tests.start_lines import GIB, ledger_of, lines, start_line
from tests.yaml_text import load_yaml

SPEC = GOLDEN / "one-host-w4a16.yml"
PLAN = plan_of(SPEC)
GPU = gpus()["A100-80GB-SXM"]
CPU_SPEC = GOLDEN / "cpu-eight-ranks.yml"


# ── what is comparable ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name, key",
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB-SXM"),
        ("NVIDIA H100 PCIe", "H100-80GB-PCIe"),
        ("NVIDIA H100 NVL", "H100-94GB-NVL"),
        ("NVIDIA H200", "H200-141GB-SXM"),
        ("NVIDIA B200", "B200-180GB-SXM"),
        ("NVIDIA L40S", "L40S-48GB"),
        ("NVIDIA L4", "L4-24GB"),
        ("NVIDIA A10", "A10-24GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090-24GB"),
        ("NVIDIA RTX A6000", "RTX-A6000-48GB"),
        ("AMD_Instinct_MI300X", "MI300X-192GB"),
        ("AMD Instinct MI300X OAM", "MI300X-192GB"),
    ],
)
def test_drivers_names_of_gpus_are_known(name, key):
    """A driver's name is that of its model, and of no other chip or board in the catalogue."""
    assert same_gpu(name, gpus()[key])
    alike = [one for one, gpu in gpus().items() if same_gpu(name, gpu)]
    assert {gpus()[one].label for one in alike} == {gpus()[key].label}
    assert len({one.rsplit("-", 1)[-1] for one in alike}) == 1, "one form factor"


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA A1000",
        "NVIDIA GA100",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA A10",
        "cpu",
    ],
)
def test_other_gpus_are_not_taken_for_it(name):
    """Another chip, board or slice of the chip is another GPU."""
    assert not same_gpu(name, GPU)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({}, ""),
        ({"revision": "00000000", "model": "/elsewhere/the-same"}, ""),
        ({"vllm_version": "0.32.0+cu129"}, ""),
        ({"vllm_version": "0.32.1"}, "with vLLM 0.32.1"),
        ({"model_config_sha256": "0" * 64}, "of another model"),
        ({"settings_sha256": "0" * 64}, "with other settings"),
        ({"terms": {"device_name": "NVIDIA H100 80GB HBM3"}}, "on another GPU (NVIDIA H100"),
        ({"terms": {"total_bytes": 96 * GIB}}, "with other memory than 79.25 GiB"),
    ],
)
def test_what_is_comparable(changes, reason):
    """The same config.json, vLLM, GPU and settings, wherever the checkpoint lies."""
    (start,) = ledger_of(start_line(PLAN, **changes)).starts
    found = difference(start, PLAN.replica, GPU)
    assert found.startswith(reason) if reason.startswith("of") else reason in found
    assert bool(found) is bool(reason)


def test_one_strange_gpu_of_eight_is_enough():
    """A replica over two kinds of GPU is comparable with neither."""
    line = start_line(PLAN)
    line["memory"][7]["device_name"] = "NVIDIA A100 80GB PCIe"
    (start,) = ledger_of(line).starts
    assert "another GPU" in difference(start, PLAN.replica, GPU)


def test_a_gpu_without_a_name_is_not_comparable():
    """A worker that could not name its GPU leaves the rest of its line, which then counts nowhere."""
    line = start_line(PLAN)
    for rank in line["memory"]:
        del rank["device_name"]
    (start,) = ledger_of(line).starts
    assert difference(start, PLAN.replica, GPU) == "on another GPU (not named)"
    assert ledger_of(json.loads(start.text())).starts == (start,)


def test_a_start_on_cpus_says_nothing_of_gpus():
    """The CPU engine serves the same model in another way."""
    cpu = plan_of(CPU_SPEC)
    (start,) = ledger_of(start_line(cpu)).starts
    assert difference(start, PLAN.replica, GPU) == "on cpu"
    assert difference(start, cpu.replica, None) == ""


# ── what they change ────────────────────────────────────────────────────────────────────────────


def test_comparable_starts_narrow_the_estimate():
    """The plan names the measured terms and what they rest on; the range is narrower."""
    plan = plan_of(SPEC, ledger_of(start_line(PLAN)))
    assert PLAN.memory is not None
    assert plan.memory is not None
    assert plan.memory.calibrated == ["weights", "activation", "non_torch", "cuda_graphs"]
    assert PLAN.memory.calibrated == []
    wide = PLAN.memory.kv_high_bytes - PLAN.memory.kv_low_bytes
    narrow = plan.memory.kv_high_bytes - plan.memory.kv_low_bytes
    assert narrow < wide / 3
    assert plan.memory.weights_bytes == 25 * GIB
    assert "measured: 1 start" in plan.memory.terms[1].basis
    assert "starts.jsonl: 1 of 1 starts are comparable with this plan." in plan.notes
    assert "by real starts" in table(plan)


def test_the_cache_is_that_of_the_start():
    """Planned again as it was started, the expected KV cache is what vLLM found."""
    line = start_line(PLAN, terms={"total_bytes": int(79.15 * GIB)})
    plan = plan_of(SPEC, ledger_of(line))
    assert plan.memory is not None
    assert plan.memory.kv_bytes == line["memory"][0]["kv_bytes"]
    assert plan.memory.total_bytes == int(79.15 * GIB), "as the driver there reports it"


def test_starts_choose_nothing():
    """The replica and its revision are the same with any evidence: a plan does not chase its own
    measurement.
    """
    plan = plan_of(SPEC, ledger_of(start_line(PLAN)))
    assert plan.replica == PLAN.replica
    assert plan.door == PLAN.door
    assert plan.scaling == PLAN.scaling


def test_other_starts_are_counted_with_their_reason():
    """What is not comparable changes no figure, and the plan says why it is not used."""
    others = [
        start_line(PLAN, model_config_sha256="0" * 64, started_at=1e9),
        start_line(PLAN, model_config_sha256="1" * 64, started_at=2e9),
        start_line(PLAN, vllm_version="0.31.0"),
    ]
    plan = plan_of(SPEC, ledger_of(*others))
    assert plan.memory == PLAN.memory
    assert plan.start is None
    (note,) = [note for note in plan.notes if note.startswith("starts.jsonl")]
    assert "0 of 3 starts" in note
    assert "2 of another model (config.json)" in note
    assert "1 with vLLM 0.31.0" in note


def test_a_start_of_another_cut_is_said_to_narrow_nothing():
    """It is comparable, but no term of this cut follows from it."""
    line = start_line(PLAN)
    line["engine"]["tensor_parallel_size"] = 4
    line["memory"] = line["memory"][:4]
    plan = plan_of(SPEC, ledger_of(line))
    assert plan.memory == PLAN.memory
    assert any("narrow no term" in note for note in plan.notes)
    assert plan.start is None


@pytest.mark.parametrize("weights", [GIB, 26 * GIB + GIB // 2])
def test_a_start_with_other_weights_is_of_another_model(weights):
    """Weights follow from the shapes: a line that contradicts them is no evidence, not even of time."""
    plan = plan_of(SPEC, ledger_of(start_line(PLAN, terms={"weights_bytes": weights})))
    assert plan.memory == PLAN.memory
    assert plan.start is None
    assert any("their weights are not the 25." in note for note in plan.notes)


def test_what_is_told_beside_starts_plans_with_them():
    """A length that calculation alone allows, and the starts refuse, is not told."""
    weights = int(26.2 * GIB)  # of 25.1 by calculation
    terms = {"weights_bytes": weights, "consumed_bytes": weights + 2 * GIB}
    ledger = ledger_of(start_line(PLAN, terms=terms))
    tight = "  limits: {max_model_len: %s, gpu_memory_utilization: 0.4}\n  endpoint:"

    def planned(length, ledger=ledger):
        return plan_of(SPEC, ledger, **{"  endpoint:": tight % length})

    with pytest.raises(DoesNotFitError) as raised:
        planned(131072)
    sure, best = re.findall(r"max_model_len: (\d+)|or (\d+) ", raised.value.do)
    assert planned(sure[0]).memory.verdict.startswith("fits")
    assert planned(best[1]).memory.verdict.startswith("within")
    with pytest.raises(DoesNotFitError) as alone:
        planned(131072, ledger_of())
    assert int(re.findall(r"or (\d+) ", alone.value.do)[0]) > int(best[1])


def test_starts_that_show_that_it_does_not_fit_refuse():
    """What stays beside the weights leaves nothing: the refusal names the measurement."""
    terms = {"consumed_bytes": 77 * GIB, "activation_bytes": GIB, "requested_bytes": 78 * GIB}
    with pytest.raises(DoesNotFitError) as raised:
        plan_of(SPEC, ledger_of(start_line(PLAN, terms=terms)))
    assert "non_torch 52.0" in raised.value.found


def test_a_model_that_is_not_known_says_that_starts_do_not_narrow_it(tmp_path):
    """The simple estimate has no terms that a start could replace."""
    config = json.loads((GOLDEN / "configs" / "llama-70b.json").read_text())
    config["architectures"] = ["ArceeForCausalLM"]
    config["model_type"] = "arcee"
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = (GOLDEN / "replicas-70b.yml").read_text()
    name = load_yaml(spec)["rayserve_cluster"]["model"]["config"]
    spec = spec.replace("    config:", "    checkpoint_bytes: 141107412992\n    config:")
    (tmp_path / "cluster.yml").write_text(spec.replace(name, "config.json"))
    files = inventory.locate(str(tmp_path), None)
    plan = planning.make_plan(files).plan
    assert plan.memory is not None
    assert plan.memory.model == "simple"
    gpu = gpus()["H100-80GB-SXM"]
    terms = {"device_name": "NVIDIA H100 80GB HBM3", "total_bytes": gpu.memory_bytes}
    (tmp_path / "starts.jsonl").write_bytes(lines(start_line(plan, terms=terms)))
    again = planning.make_plan(files).plan
    assert again.memory == plan.memory
    assert any(
        "takes from real starts no more than the GPU's total" in note for note in again.notes
    )
    assert again.start is not None


# ── how long a start takes ──────────────────────────────────────────────────────────────────────


def starts(*records):
    """The starts of some lines."""
    return ledger_of(*records).starts


@pytest.mark.parametrize("total_s", [14.3, 15.2, 15.5, 20.0, 21.4])
def test_one_start_leaves_room_for_the_next(total_s):
    """The range from any one of the measured starts holds all others."""
    line = start_line(PLAN, total_s=total_s, phases_s={"read": 0.02})
    found = start_estimate(PLAN.replica, starts(line), read_bytes=1, disk_gb_s=0)
    assert found is not None
    assert found.low_s <= 14.3
    assert found.high_s >= 21.4


def test_without_disk_and_starts_nothing_is_predicted():
    """No figure where nothing tells."""
    assert start_estimate(PLAN.replica, [], read_bytes=10**12, disk_gb_s=0) is None
    assert PLAN.start is None


def test_the_disk_alone_is_a_lower_bound():
    """200 GB at 2 GB/s take 100 s, and the start at least that."""
    found = start_estimate(PLAN.replica, [], read_bytes=200 * 10**9, disk_gb_s=2)
    assert found is not None
    assert (found.low_s, found.expected_s, found.load_s, found.starts) == (100, 100, 100, 0)
    assert found.basis.startswith("reading 200.0 GB at 2 GB/s")


def test_a_slow_disk_replaces_what_a_warm_cache_read():
    """The start read in 100 s; a cold disk needs 400 s, and the other 100 s stay."""
    found = start_estimate(
        PLAN.replica, starts(start_line(PLAN)), read_bytes=200 * 10**9, disk_gb_s=0.5
    )
    assert found is not None
    assert (found.load_s, found.rest_s, found.expected_s) == (400, 100, 500)
    assert found.low_s < 200 < found.expected_s < found.high_s


def test_a_fast_disk_promises_no_faster_load():
    """What real starts took to read is not undercut by the disk's figure."""
    found = start_estimate(
        PLAN.replica, starts(start_line(PLAN)), read_bytes=200 * 10**9, disk_gb_s=100
    )
    assert found is not None
    assert (found.load_s, found.expected_s) == (100, 200)


def test_a_disk_that_hardly_reads_is_a_finite_figure():
    """The least positive number is no division into infinity."""
    found = start_estimate(PLAN.replica, [], read_bytes=10**12, disk_gb_s=5e-324)
    assert found is not None
    assert found.expected_s == 7 * 86400


def test_starts_alone_predict_too():
    """Without the disk's bandwidth the next start is like the known ones: their median."""
    records = [start_line(PLAN, total_s=total, started_at=total * 1e6) for total in (190, 200, 260)]
    found = start_estimate(PLAN.replica, starts(*records), read_bytes=10**12, disk_gb_s=0)
    assert found is not None
    assert found.expected_s == 200
    assert found.low_s < 190
    assert found.high_s > 260
    assert found.starts == 3


def test_a_loader_that_reads_otherwise_is_not_predicted_by_the_disk():
    """Random weights read nothing."""
    item = PLAN.replica.engine_args[0].model_copy(update={"name": "load_format", "value": "dummy"})
    replica = PLAN.replica.model_copy(update={"engine_args": [*PLAN.replica.engine_args, item]})
    assert start_estimate(replica, [], read_bytes=10**12, disk_gb_s=1) is None


def test_starts_of_the_same_limits_come_first():
    """More batch sizes are more graphs to record; without such starts others do, and that is said."""
    other = start_line(PLAN, max_num_seqs=7, total_s=900.0)
    found = start_estimate(PLAN.replica, starts(start_line(PLAN), other), read_bytes=1, disk_gb_s=0)
    assert found is not None
    assert (found.expected_s, found.starts) == (200, 1)
    found = start_estimate(PLAN.replica, starts(other), read_bytes=1, disk_gb_s=0)
    assert found is not None
    assert found.expected_s == 900
    assert "with other limits" in found.basis


@pytest.mark.parametrize(
    "disk_gb_s, budget_s, word",
    [(10, 1800, ""), (0.1, 1800, "longer than timeouts.start_s (1800)"), (0.2, 1300, "close to")],
)
def test_the_budget_is_compared(disk_gb_s, budget_s, word):
    """A prediction beyond the start budget, or near it, is a note."""
    found = start_estimate(PLAN.replica, [], read_bytes=216 * 10**9, disk_gb_s=disk_gb_s)
    notes = budget_notes(found, budget_s)
    assert word in "".join(notes)
    assert bool(notes) is bool(word)


def test_the_plan_shows_the_start():
    """`disk_gb_s` of the pool becomes a row, a record, and a note where the budget is short."""
    ledger = ledger_of(start_line(PLAN))
    plan = plan_of(SPEC, ledger, **{"gpus_per_host: 8": "gpus_per_host: 8, disk_gb_s: 0.1"})
    assert plan.start is not None
    assert plan.start.load_s == pytest.approx(2040, rel=0.1), "about 203 GB of 405B in 4 bits"
    shown = " ".join(table(plan).split())
    row = r"start: \d+ s \(\d+ to \d+\): reading \d+\.\d GB at 0\.1 GB/s; 1 real start; timeouts"
    assert re.search(row, shown)
    assert "timeouts.start_s is 1800" in shown
    assert any("longer than timeouts.start_s" in note for note in plan.notes)
    assert plan.replica == PLAN.replica


def test_a_start_of_which_only_the_disk_tells_is_a_lower_bound():
    """The row says what takes that long, and how long a start may take."""
    plan = plan_of(SPEC, **{"gpus_per_host: 8": "gpus_per_host: 8, disk_gb_s: 0.1"})
    shown = " ".join(table(plan).split())
    row = r"start: at least \d+ s: reading \d+\.\d GB at 0\.1 GB/s; no real start tells the rest; timeouts"
    assert re.search(row, shown)


def test_starts_of_the_cpu_engine_predict_time_only():
    """There is no GPU memory; the time of a start is known from another one."""
    cpu = plan_of(CPU_SPEC)
    plan = plan_of(CPU_SPEC, ledger_of(start_line(cpu)))
    assert plan.memory is None
    assert plan.start is not None
    assert plan.start.expected_s == 200
    assert not any("narrow" in note for note in plan.notes)


# ── the command ─────────────────────────────────────────────────────────────────────────────────
