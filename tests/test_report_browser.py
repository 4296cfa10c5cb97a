"""The committed report in headless Chromium: everything loads, tables sort and filter, light and dark, on a phone.

That the report is what the records and this version give, ``python -m analysis --check`` tells.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from pathlib import Path

import pytest
from browser import Browser, missing

from analysis import choose
from analysis.__main__ import ROOT
from replayssm import traffic

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "installed")
PHONE, DESK = (360, 740), (1280, 900)
REPORT = ROOT / "results" / "report"
ROWS = """
  const rows = [...document.querySelectorAll("#table-kernel_speedups tbody tr")].filter((row) => !row.hidden);
  return rows.map((row) => [...row.cells].map((cell) => cell.textContent));"""


@pytest.fixture(scope="module")
def browser():
    found = Browser()
    yield found
    found.close()


@pytest.fixture
def page(browser):
    browser.emulate(*DESK)
    browser.open(REPORT / "index.html")
    return browser


def test_everything_loads_and_nothing_is_reported(page):
    sizes = page.run(
        "for (const image of document.images) image.loading = 'eager';"
        "return Promise.all([...document.images].map((i) => i.decode().then(() => i.naturalWidth)))"
    )
    assert len(sizes) > 8
    assert min(sizes) > 300
    assert page.errors() == []


def test_every_link_has_its_target(page):
    places = page.run("return [...document.querySelectorAll('a')].map((a) => a.getAttribute('href'))")
    inside = {place[1:] for place in places if place.startswith("#")}
    assert page.run("return arguments[0].filter((id) => !document.getElementById(id))", sorted(inside)) == []
    files = {place for place in places if not place.startswith("#")} - {"choose.html"}
    assert [place for place in files if not (REPORT / place).is_file()] == []
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
    every = page.run(ROWS)
    wanted = [row for row in every if "replay/cpu" in row and "SLOWER" in row]
    assert page.run(write_words + ROWS, "Replay/CPU  slower") == wanted
    assert 0 < len(wanted) < len(every)
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


def test_the_second_page_shows_what_python_computed(browser):
    text = (REPORT / "choose.html").read_text(encoding="utf-8")
    found = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1])
    place = next(key for key, entry in found["measured"].items() if entry["whole"])
    model, device, state, batch = place.split("|")
    entry, context = found["measured"][place], next(iter(found["measured"][place]["whole"]))
    pick = {"model": model, "device": device, "batch": batch, "context": context, "state": state}
    browser.open(REPORT / "choose.html")
    picked = "return Object.fromEntries(new FormData(document.querySelector('form')))"
    assert browser.run(picked) == found["first"]
    browser.open(REPORT / "choose.html", "#" + urllib.parse.urlencode(pick))
    read = "return Object.fromEntries([...document.querySelectorAll('#answers tr')].map("
    read += "(row) => [...row.cells].map((cell) => cell.textContent)))"
    shown = browser.run(read)
    at, size = found["contexts"].index(int(context)), found["batches"].index(int(batch))
    _, told, why = entry["verdicts"][entry["verdict"][at]]
    assert browser.run("return document.getElementById('verdict').textContent") == told + why
    wanted = choose.models(ROOT / "configs" / "model")
    geometry = next(one.geometry for one in wanted if one.name == model)
    length = traffic.best_interval_length(geometry, state, ring=choose.RING)
    ideal = traffic.ideal_speedup(geometry, length, state, ring=choose.RING)
    assert shown["predicted, one layer"].startswith(f"{ideal:.3g}x at L = {length};")
    assert shown["predicted, whole step"] == f"{found['bytes'][model][state]['whole'][size][at]}x at L = {length}"
    arm, _, speedup, low, high, *_ = entry["whole"][context]
    assert shown["measured, whole model"] == f"{speedup:.2f}x [{low:.2f}, {high:.2f}]"
    assert browser.run("return document.querySelector('#answers').textContent.includes(arguments[0])", arm)

    change = """const select = document.querySelector("[name=batch]"); select.value = arguments[0];
      select.dispatchEvent(new Event("input", { bubbles: true }));
      return document.getElementById("verdict").textContent"""
    key = [model, device, state]
    other = next(str(size) for size in found["batches"] if "|".join([*key, str(size)]) not in found["measured"])
    assert browser.run(change, other).startswith("not measured on this device")
    assert f"batch={other}" in browser.run("return location.hash")
    browser.emulate(*PHONE, phone=True)
    assert browser.run("return [document.documentElement.scrollWidth, innerWidth]") == [PHONE[0], PHONE[0]]
    assert browser.errors() == []
