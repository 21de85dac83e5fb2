"""Does a plan look the same to everyone: with colours or without, as text and as a page?"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve import inventory, planning
from rayserve.plan import NamedValue, Plan
from rayserve.planner import build_curves
from rayserve.planner.curves import batches, lengths
from rayserve.planner.views.charts import decade_axis, doubling_axis, zero_axis
from rayserve.planner.views.markup import VOID, Markup, element, escaped
from rayserve.planner.views.page import page
from rayserve.planner.views.parts import FREE, KV_CACHE, memory_bar
from rayserve.planner.views.terminal import Style, bar_columns, style_of, table
from rayserve.spec import absolute_paths, parse_spec
from tests.bad_specs import ROOT
from tests.golden_specs import FOLDER, GOLDEN, SPECS, plan_of

HOSTILE = '</title><script>alert(1)</script>"><img src=x onerror=alert(2)>&amp;\x00\u202e'
ANSI = re.compile(r"\x1b\[[0-9;]*m")
NARROW, WIDE = 60, 100


@functools.cache
def golden(name: str) -> Plan:
    """The plan of a golden spec."""
    return plan_of(GOLDEN / f"{name}.yml")


@functools.cache
def curves_of(name: str):
    """The curves of a golden spec."""
    path = GOLDEN / f"{name}.yml"
    spec = absolute_paths(parse_spec(path.read_text(), path.name), FOLDER)
    draft = spec.speculative.config if spec.speculative is not None else ""
    return build_curves(
        golden(name),
        spec,
        json.loads((GOLDEN / spec.model.config).read_text()),
        draft_config=json.loads((GOLDEN / draft).read_text()) if draft else None,
    )


class Tree(HTMLParser):
    """The elements and attributes of a page; fails where an end tag closes another element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


# ── the terminal ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
@pytest.mark.parametrize("style", [Style(), Style(NARROW), Style(WIDE, colour=True, blocks=True)])
def test_no_line_is_wider_than_the_terminal(path, style):
    """Every line of the table has room, but for one word that cannot be cut."""
    lines = [ANSI.sub("", line) for line in table(golden(path.stem), style).splitlines()]
    long = [line for line in lines if len(line) > style.width]
    assert [line for line in long if max(map(len, line.split())) < style.width - 12] == []


def test_the_example_is_one_screen():
    """The verdict, the bar, latencies, limits and reasons take thirty lines of a hundred columns."""
    files = inventory.locate(str(ROOT / "inventories" / "example"), None)
    lines = table(planning.make_plan(files).plan).splitlines()
    assert len(lines) <= 30
    assert lines[0].endswith(": fits")


def test_requests_that_the_cache_holds_are_not_taken_for_a_share_of_them():
    """Of both lengths it says how many: "595 of the expected 1,280" would read as too few."""
    plan = golden("one-host-w4a16")
    memory = plan.memory
    held = " ".join(table(plan).split())
    length = plan.replica.engine_arguments()["max_model_len"]
    assert f"{memory.max_concurrency:g} sequences of {length:,}" in held
    count, tokens = memory.expected_concurrency, memory.request_tokens
    assert f", {count:,.0f} requests of {tokens:,} tokens" in held


def test_colours_say_nothing_alone():
    """Without its colours the text is the same, but for what the bar is drawn with."""
    plan = golden("one-host-w4a16")
    coloured = ANSI.sub("", table(plan, Style(colour=True)))
    assert coloured == table(plan)
    assert ANSI.search(table(plan, Style(colour=True)))
    assert "█" in table(plan, Style(colour=True, blocks=True))


@pytest.mark.parametrize(
    "terminal, environment, encoding, colour, blocks",
    [
        (True, {"TERM": "xterm"}, "utf-8", True, True),
        (False, {"TERM": "xterm"}, "utf-8", False, True),
        (True, {"TERM": "dumb"}, "utf-8", False, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, "utf-8", False, True),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, "utf-8", True, True),
        (True, {"TERM": "xterm"}, "ascii", True, False),
        (True, {"TERM": "xterm"}, "latin-1", True, False),
        (True, {}, "no-such-encoding", True, False),
    ],
)
def test_the_style_is_what_the_terminal_can_show(terminal, environment, encoding, colour, blocks):
    """Colours only on a terminal that has them and wants them; blocks only where they can be written."""
    style = style_of(terminal=terminal, environment=environment, encoding=encoding, width=80)
    assert (style.colour, style.blocks) == (colour, blocks)


@pytest.mark.parametrize("width, used", [(20, 60), (80, 80), (200, 100), (0, 100)])
def test_the_width_has_bounds(width, used):
    """Neither a sliver nor a wall of text; an unknown width is that of a usual screen."""
    style = style_of(terminal=True, environment={}, encoding="ascii", width=width)
    assert style.width == used


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_plain_terminal_gets_ascii(path):
    """Where blocks cannot be written, nothing else that ASCII lacks is."""
    assert table(golden(path.stem), Style()).isascii()


@pytest.mark.parametrize("name", ["one-host-w4a16", "two-hosts-bf16", "everything", "moe-fp8"])
@given(width=st.integers(40, 400))
def test_the_columns_of_the_bar_are_its_bytes(name, width):
    """Each part has its share of the columns, one at least, and all together the width."""
    bar = memory_bar(golden(name).memory)
    columns = bar_columns(bar, width)
    assert sum(columns) == width
    for part, count in zip(bar.parts, columns, strict=True):
        share = part.expected_bytes / bar.total_bytes * width
        assert count >= 1
        assert abs(count - share) <= len(bar.parts)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_parts_are_the_whole_gpu(path):
    """Without gaps, from weights to what is left free; the cache may begin around its beginning."""
    memory = golden(path.stem).memory
    if memory is None:
        return
    bar = memory_bar(memory)
    assert sum(part.expected_bytes for part in bar.parts) == bar.total_bytes == memory.total_bytes
    keys = [part.key for part in bar.parts]
    assert keys[0] == "weights"
    assert keys[-2:] == [KV_CACHE, FREE]
    if bar.edge_bytes is not None:
        low, high = bar.edge_bytes
        assert low <= bar.start_bytes(KV_CACHE) <= high


def test_an_unknown_architecture_has_a_bar_without_ranges():
    """The simple estimate has three parts beside the cache, and claims no range."""
    plan = golden("one-host-w4a16")
    simple = plan.memory.model_copy(
        update={"model": "simple", "terms": [], "kv_low_bytes": 0, "kv_high_bytes": 0}
    )
    bar = memory_bar(simple)
    assert [part.key for part in bar.parts] == ["weights", "activation", "overhead", "kv", "free"]
    assert bar.edge_bytes is None
    text = table(plan.model_copy(update={"memory": simple}))
    assert "simple estimate" in text


def test_more_than_the_gpu_has_is_drawn_as_more():
    """Where the expectation exceeds the GPU, the bar grows; nothing is left free."""
    memory = golden("one-host-w4a16").memory
    large = memory.model_copy(update={"kv_bytes": memory.total_bytes})
    bar = memory_bar(large)
    assert bar.total_bytes > memory.total_bytes
    assert FREE not in [part.key for part in bar.parts]


# ── curves ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["one-host-w4a16", "two-hosts-bf16", "moe-fp8"])
def test_curves_meet_the_plan(name):
    """At the plan's own points the curves have the plan's own figures."""
    plan, curves = golden(name), curves_of(name)
    end = curves.capacity[-1]
    assert end.context_tokens == plan.replica.engine_arguments()["max_model_len"]
    assert end.low == pytest.approx(plan.memory.max_concurrency_low, abs=0.01)
    assert end.expected == pytest.approx(plan.memory.max_concurrency, abs=0.01)
    assert end.high == pytest.approx(plan.memory.max_concurrency_high, abs=0.01)
    alone = plan.latency.tpot[0]
    assert alone.high_ms == pytest.approx(curves.tpot[0].high_ms, abs=0.06)
    longest = max(plan.latency.ttft, key=lambda time: (time.prompt_tokens, -time.cached_tokens))
    missed = [time for time in curves.ttft if not time.cached_tokens]
    assert missed[-1].prompt_tokens == longest.prompt_tokens
    assert missed[-1].low_ms == pytest.approx(longest.low_ms, abs=0.06)
    assert len(curves.stages) == plan.replica.placement.pipeline_parallel_size
    assert plan.memory.kv_bytes in [stage.kv_bytes for stage in curves.stages]


def test_longer_sequences_are_fewer():
    """The capacity falls with the length, and its range holds the expectation."""
    points = curves_of("one-host-w4a16").capacity
    assert len(points) > 20
    for before, after in itertools.pairwise(points):
        assert before.expected > after.expected
        assert after.low <= after.expected <= after.high


@given(longest=st.integers(1, 2**24))
def test_lengths_end_at_the_longest(longest):
    """Ascending whole numbers from one on, the longest last, not too many."""
    found = lengths(longest)
    assert found == sorted(set(found))
    assert found[0] >= 1
    assert found[-1] == longest
    assert len(found) <= 70


@given(most=st.integers(1, 4096))
def test_batches_begin_alone(most):
    """From one sequence to the most."""
    found = batches(most)
    assert found[0] == 1
    assert found[-1] == most
    assert found == sorted(set(found))


positive = st.floats(1e-3, 1e9)


@given(values=st.lists(positive, min_size=1, max_size=9))
def test_axes_hold_their_values(values):
    """Every value lies on the axis, and there are two ticks at least where it is logarithmic."""
    for make in (decade_axis, doubling_axis, zero_axis):
        axis = make("x", values, str)
        assert all(-1e-9 <= axis.share(value) <= 1 + 1e-9 for value in values)
        assert all(-1e-9 <= axis.share(tick) <= 1 + 1e-9 for tick in axis.ticks)
        assert len(axis.ticks) <= 12
        assert axis.ticks
    assert len(decade_axis("x", values, str).ticks) >= 2
    assert not math.isnan(decade_axis("x", values, str).share(0))


# ── the page ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_page_is_well_formed(path):
    """Every element is closed in its turn, ids are unique, and nothing is loaded or run."""
    text = page(golden(path.stem), path.name, curves=curves_of(path.stem))
    tree = Tree(text)
    names = {name for name, _ in tree.seen}
    assert not names & {"script", "link", "img", "iframe", "object", "form", "a"}
    ids = [attributes["id"] for _, attributes in tree.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert not {"src", "href", "onload", "onclick"} & {key for _, own in tree.seen for key in own}
    assert "http" not in text.replace("http-equiv", "")
    assert "url(" not in text


def test_a_cpu_plan_has_a_page_without_charts():
    """Where there is no GPU to prove, the page has choices and notes only."""
    text = page(golden("cpu-two-stages"), "cluster.yml")
    assert "<svg" not in text
    assert 'class="bar"' not in text
    assert "no GPU memory to prove" in text


def test_stages_that_differ_have_a_bar_each():
    """Stages are cut unevenly where layers do not divide: each has its bar."""
    text = page(golden("two-hosts-bf16"), "c.yml", curves=curves_of("two-hosts-bf16"))
    assert "stage 1 of 2" in text
    assert "stage 2 of 2" in text
    assert text.count('class="bar"') == 2


def test_the_same_plan_gives_the_same_page():
    """Byte for byte: a page can be compared with an older one."""
    one, two = (page(golden("moe-fp8"), "c.yml", curves=curves_of("moe-fp8")) for _ in range(2))
    assert hashlib.sha256(one.encode()).digest() == hashlib.sha256(two.encode()).digest()


def test_hostile_names_stay_text():
    """Whatever a name, a reason or a note holds, it adds no element and no attribute."""
    plan = golden("one-host-w4a16")
    tame = Tree(page(plan, "c.yml"))
    args = [
        NamedValue(name=HOSTILE, value=HOSTILE, reason=HOSTILE) if item.reason else item
        for item in plan.replica.engine_args
    ]
    replica = plan.replica.model_copy(
        update={"model": HOSTILE, "served_model_name": HOSTILE, "engine_args": args}
    )
    wild = plan.model_copy(
        update={"name": HOSTILE, "replica": replica, "notes": [HOSTILE for _ in plan.notes]}
    )
    text = page(wild, HOSTILE)
    found = Tree(text)
    assert [name for name, _ in found.seen] == [name for name, _ in tame.seen]
    assert [sorted(own) for _, own in found.seen] == [sorted(own) for _, own in tame.seen]
    assert "<script" not in text
    assert "\x00" not in text
    assert "\u202e" not in text
    text.encode("utf-8")


@given(text=st.text(), value=st.text())
def test_what_is_escaped_reads_as_it_was_written(text, value):
    """A parser gets every text and attribute back, but for what HTML cannot carry."""
    made = element("p", text, title=value)
    tree = Tree(made)
    assert [name for name, _ in tree.seen] == ["p"]
    assert escaped(Markup("<b>")) == "<b>"
    assert made.isprintable() or "\n" in made or "\t" in made or "\ufffd" not in text
    made.encode("utf-8")


# ── the command ─────────────────────────────────────────────────────────────────────────────────


def test_the_screen_tells_who_is_answered_and_who_waits():
    """Requests at once, those that wait, what comes after them and the length of an answer are told."""
    plan = golden("one-host-w4a16")
    door = plan.door
    told = next(line for line in table(plan).splitlines() if "requests:" in line)
    assert f"{door.max_in_flight} at once a replica, {door.max_queued} more wait" in told
    assert f"429; answers of up to {door.max_tokens:,} tokens" in told
