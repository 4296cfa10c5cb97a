"""The report in headless Chromium: nothing is reported to the console, everything loads, tables sort and filter."""

from __future__ import annotations

from pathlib import Path

import accuracies
import pytest
from browser import Browser, missing
from drift_records import drift_group
from records import case, decode_group, gpu_group, group, write

from analysis.__main__ import main

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "installed")
PHONE, DESK = (360, 740), (1280, 900)
ROWS = """
  const rows = [...document.querySelectorAll("#table-kernel_speedups tbody tr")].filter((row) => !row.hidden);
  return rows.map((row) => [...row.cells].map((cell) => cell.textContent));"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The folder of a report with every figure and table."""
    out = tmp_path_factory.mktemp("report")
    sweep = [group(case(batch=b), replicate=r, seed=r) for b in (1, 64) for r in range(2)]
    failed = group(case("qwen3_5_4b"), failed={"replay/torch": "oom"})
    write(out / "records", *sweep, failed, gpu_group(phased=True), decode_group(), drift_group(), accuracies.GRID)
    assert main(["--records", str(out / "records"), "--out", str(out)]) == 0
    return out / "report"


@pytest.fixture(scope="module")
def browser():
    found = Browser()
    yield found
    found.close()


@pytest.fixture
def page(browser, report):
    browser.emulate(*DESK)
    browser.open(report / "index.html")
    return browser


def test_everything_loads_and_nothing_is_reported(page):
    sizes = page.run(
        "for (const image of document.images) image.loading = 'eager';"
        "return Promise.all([...document.images].map((i) => i.decode().then(() => i.naturalWidth)))"
    )
    assert len(sizes) > 8
    assert min(sizes) > 300
    assert page.errors() == []


def test_every_link_has_its_target(page, report):
    places = page.run("return [...document.querySelectorAll('a')].map((a) => a.getAttribute('href'))")
    inside = {place[1:] for place in places if place.startswith("#")}
    assert page.run("return arguments[0].filter((id) => !document.getElementById(id))", sorted(inside)) == []
    files = {place for place in places if not place.startswith("#")}
    assert [place for place in files if not (report / place).is_file()] == []
    assert {Path(place).parts[1] for place in files} == {"figures", "records", "tables"}
    assert "claims" in inside


def test_a_press_on_a_head_sorts_numbers_as_numbers(page):
    before = page.run(ROWS)
    press = "document.querySelectorAll('#table-kernel_speedups th button')[arguments[0]].click();" + ROWS
    heads = page.run("return [...document.querySelectorAll('#table-kernel_speedups th')].map((h) => h.textContent)")
    column = heads.index("step us")
    times = [[float(row[column]) for row in page.run(press, column)] for _ in range(2)]
    assert times[0] == sorted(times[0]) != sorted(times[0], key=str)
    assert times[1] == sorted(times[0], reverse=True)
    state = "return document.querySelectorAll('#table-kernel_speedups th')[arguments[0]].getAttribute('aria-sort')"
    assert page.run(state, column) == "descending"
    assert page.run(press, column) == before


def test_words_filter_rows_and_a_verdict_filters_claims(page):
    write_words = """const input = document.querySelector("#table-kernel_speedups input");
      input.value = arguments[0]; input.dispatchEvent(new Event("input"));"""
    found = page.run(write_words + ROWS, "Replay/CPU  faster")
    assert found
    assert all("replay/cpu" in row and "FASTER" in row for row in found)
    assert page.run(write_words + ROWS, "nothing of the kind") == []
    told = "return document.querySelector('#table-kernel_speedups .filter .count').textContent"
    assert page.run(told).startswith("0 of ")
    claims = """document.querySelector("li[data-verdict='not run'] button").click();
      return [...document.querySelectorAll(".claims tbody tr:not(.group)")].filter((row) => row.offsetHeight)
        .map((row) => row.cells[3].textContent);"""
    assert set(page.run(claims)) == {"not run"}
    assert len(set(page.run(claims))) > 1


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_follows_the_readers_scheme(page, dark):
    page.emulate(*DESK, dark=dark)
    channels = "return getComputedStyle(document.body)[arguments[0]].match(/[0-9]+/g).slice(0, 3).map(Number)"
    paper, ink = (sum(page.run(channels, name)) / 3 for name in ("backgroundColor", "color"))
    assert (paper < 60 and ink > 200) if dark else (paper > 240 and ink < 60)


def test_a_phone_shows_the_page_without_scrolling_sideways(page):
    page.emulate(*PHONE, phone=True)
    page.run("for (const part of document.querySelectorAll('details')) part.open = true")
    assert page.run("return [document.documentElement.scrollWidth, innerWidth]") == [PHONE[0], PHONE[0]]
