"""Does the page of a plan look right in a browser: light and dark, wide, on a phone and on paper?"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from rayserve import inventory, planning
from rayserve.page import text_of
from rayserve.planner.views.page import page
from rayserve.planner.views.parts import memory_bar
from scripts.setup_browser import find_browser
from tests.bad_specs import ROOT
from tests.chromium import View, chromium

WIDTHS = (1280, 768, 375, 320)
PAPER = 794
"""Pixels of CSS across a page of A4."""
LEAST_CONTRAST = 4.5
"""Of text against what is behind it: level AA of WCAG 2."""

# Every element with a text of its own: what it says, its colour, and the colour behind it.
CONTRAST = """
(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = node => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return parse(getComputedStyle(document.body).backgroundColor);
  };
  document.querySelectorAll('details').forEach(one => one.open = true);
  return [...document.body.querySelectorAll('*')].filter(
    node => [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim())
      && node.getClientRects().length && !['TITLE', 'DESC'].includes(node.tagName.toUpperCase())
  ).map(node => {
    const style = getComputedStyle(node);
    const front = light(parse(node.closest('svg') ? style.fill : style.color));
    const back = light(behind(node));
    const ratio = (Math.max(front, back) + .05) / (Math.min(front, back) + .05);
    return [node.textContent.trim().slice(0, 40), ratio];
  });
})()
"""
# Elements that reach beyond the window, but for what lies in a table that scrolls by itself.
TOO_WIDE = """
[...document.body.querySelectorAll('*')].filter(node => !node.closest('.scroll *')
  && node.getBoundingClientRect().right > innerWidth + 1).map(node => node.outerHTML.slice(0, 80))
"""
# (label, y) of the ticks of the upright axis, and the place where a line ends.
AXIS = """
(svg => ({
  ticks: [...svg.querySelectorAll('text[text-anchor=end]')].map(
    one => [one.textContent, +one.getAttribute('y') - 4]),
  end: svg.querySelector('.line').getAttribute('d').split(/[ML]/).pop().trim().split(' ').map(Number)
}))(document.querySelector('svg.chart'))
"""


@pytest.fixture(scope="module")
def planned():
    """The example's plan, with its page."""
    files = inventory.locate(str(ROOT / "inventories" / "example"), None)
    planned = planning.make_plan(files)
    return SimpleNamespace(plan=planned.plan, page=text_of(planned, files.spec.name))


@pytest.fixture(scope="module")
def path(planned, tmp_path_factory):
    """The page as a file."""
    file = tmp_path_factory.mktemp("page") / "plan.html"
    file.write_text(planned.page, "utf-8")
    return file


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    """A window of a headless Chromium."""
    program = find_browser()
    if program is None:
        pytest.skip("Chromium is not installed: scripts/setup_browser.py says how")
    with chromium(program, tmp_path_factory.mktemp("chromium")) as browser:
        yield View(browser)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(view, path, width, dark):
    """From a phone to a desk the page scrolls one way only, loads nothing else and complains of nothing."""
    view.open(path, width=width, dark=dark)
    view.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert view.evaluate("document.scrollingElement.scrollWidth") <= width
    assert view.evaluate(TOO_WIDE) == []
    assert view.requests() == [path.as_uri()]
    assert view.complaints() == []


def test_paper(view, path):
    """Printed, it is as wide as the paper, and a PDF of some pages."""
    view.open(path, width=PAPER, media="print")
    assert view.evaluate("document.scrollingElement.scrollWidth") <= PAPER
    pdf = view.call("Page.printToPDF", printBackground=True)["data"]
    assert len(pdf) > 10_000


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_can_be_read(view, path, dark):
    """Every text stands out from what is behind it."""
    view.open(path, width=1280, dark=dark)
    seen = view.evaluate(CONTRAST)
    assert len(seen) > 100
    assert [(text, round(ratio, 2)) for text, ratio in seen if ratio < LEAST_CONTRAST] == []


def test_dark_is_dark(view, path):
    """The paper is bright in the light scheme and dark in the dark one."""
    corners = []
    for dark in (False, True):
        view.open(path, width=1280, dark=dark)
        corners.append(view.picture("body").getpixel((3, 3)))
    light, dark = map(sum, corners)
    assert light > 3 * 230
    assert dark < 3 * 40


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_the_bar_is_in_proportion(view, path, planned, width, dark):
    """Pixels of the memory bar are the plan's bytes: weights, a cache that is certain, what is free."""
    view.open(path, width=width, dark=dark)
    picture = view.picture(".bar")
    total = memory_bar(planned.plan.memory).total_bytes
    across = [picture.getpixel((x, picture.height // 2)) for x in range(picture.width)]

    def share(part: str) -> float:
        rgb = view.evaluate(
            f"getComputedStyle(document.querySelector('.bar .{part}')).backgroundColor"
        )
        colour = tuple(map(int, rgb[4:-1].split(", ")))
        return across.count(colour) / picture.width

    pixels = 4 / picture.width  # edges, and the lines between parts
    memory = planned.plan.memory
    assert share("weights") == pytest.approx(memory.weights_bytes / total, abs=pixels)
    free = (memory.total_bytes - memory.requested_bytes) / total
    assert share("free") == pytest.approx(free, abs=pixels)
    certain, expected = memory.kv_low_bytes / total, memory.kv_bytes / total
    assert certain - pixels < share("kv") < expected + pixels


def test_the_curve_ends_where_the_plan_says(view, path, planned):
    """Read off the axis, the capacity at the longest context is the plan's max_concurrency."""
    view.open(path, width=1280)
    found = view.evaluate(AXIS)
    (first, low), (last, high) = (
        (math.log(float(label.replace(",", ""))), y)
        for label, y in (found["ticks"][0], found["ticks"][-1])
    )
    y = found["end"][1]
    value = math.exp(first + (y - low) / (high - low) * (last - first))
    assert value == pytest.approx(planned.plan.memory.max_concurrency, rel=0.02)


def test_a_hostile_name_does_nothing(view, planned, tmp_path):
    """A name that is markup is shown as it is written: nothing runs, nothing is asked for."""
    name = "<script>document.title='run'</script><img src='http://example.invalid/x' onerror='f()'>"
    replica = planned.plan.replica.model_copy(update={"model": name, "served_model_name": name})
    file = tmp_path / "hostile.html"
    file.write_text(page(planned.plan.model_copy(update={"replica": replica}), name), "utf-8")
    view.open(file, width=1280)
    assert view.evaluate("document.querySelector('header').textContent").count(name) == 2
    assert view.evaluate("document.title") != "run"
    assert view.requests() == [file.as_uri()]
    assert view.complaints() == []


def test_the_policy_holds(view, planned, tmp_path):
    """Even if markup got in, the page's own policy lets nothing run and nothing be asked for."""
    smuggled = "<script>document.title='run'</script><img src='http://example.invalid/x'></main>"
    file = tmp_path / "smuggled.html"
    file.write_text(planned.page.replace("</main>", smuggled), "utf-8")
    view.open(file, width=1280)
    assert view.evaluate("document.title") != "run"
    assert len(view.complaints()) == 2


def test_pictures_have_names(view, path):
    """To a screen reader each picture is an image with a name, and its figures are in a table."""
    view.open(path, width=1280)
    nodes = view.call("Accessibility.getFullAXTree")["nodes"]
    images = [node for node in nodes if node.get("role", {}).get("value") in ("image", "img")]
    assert len(images) >= 2
    assert all(node.get("name", {}).get("value") for node in images)
    assert view.evaluate("document.querySelectorAll('table').length") >= len(images)


def test_the_page_says_what_the_plan_says(view, path, planned):
    """Verdict, model and every reason and note can be read on it."""
    view.open(path, width=1280)
    text = view.evaluate("document.body.textContent")
    plan = planned.plan
    reasons = [item.reason for item in [*plan.replica.engine_args, *plan.environment]]
    for words in (plan.memory.verdict, plan.replica.model, *filter(None, reasons), *plan.notes):
        assert words in text
