"""SVG made small: nothing that is drawn may be lost."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from analysis import style
from analysis.svg import compact

DRAWN = ("path", "use", "image", "clipPath")


@pytest.fixture(scope="module")
def written():
    """A figure with markers, clipped lines, bands and text, as matplotlib writes it."""
    with plt.rc_context(style.RC):
        figure, ax = plt.subplots()
        ax.errorbar([1, 2, 3], [0.123456789, -0.000123456789, 7], yerr=[0.1, 0.2, 0.3], marker="o", label="replay/cpu")
        ax.fill_between([1, 3], [0, 1], [2, 3], alpha=0.15)
        ax.set_xlabel("batch size")
        ax.legend()
        text = io.StringIO()
        figure.savefig(text, format="svg")
        plt.close(figure)
    return text.getvalue()


def numbers(svg):
    """Every number that places something, in order, scales apart."""
    paths = re.findall(r' d="([^"]*)"', svg)
    return [float(n) for path in paths for n in re.findall(r"-?[\d.]+", path)]


def test_the_same_things_are_drawn_at_the_same_places(written):
    small = compact(written, "f")
    trees = [ET.fromstring(text) for text in (written, small)]
    for name in DRAWN:
        counts = [len(tree.findall(f".//{{http://www.w3.org/2000/svg}}{name}")) for tree in trees]
        assert counts[0] == counts[1]
    assert numbers(small) == pytest.approx(numbers(written), abs=0.0051)
    assert len(small) < 0.75 * len(written)


def test_every_reference_has_its_target_once(written):
    small = compact(written, "f1a")
    ids = re.findall(r' id="([^"]+)"', small)
    assert set(ids) == set(re.findall(r'(?:url\(#|href="#)([^)"]+)', small))
    assert len(ids) == len(set(ids))
    assert all(name.startswith("f1a") for name in ids)


def test_all_figures_may_stand_in_one_page():
    folder = Path(__file__).resolve().parent.parent / "results" / "figures"
    ids = [set(re.findall(r' id="([^"]+)"', path.read_text(encoding="utf-8"))) for path in folder.glob("*.svg")]
    assert len(set().union(*ids)) == sum(map(len, ids)) > 100


def test_small_numbers_keep_their_digits():
    assert compact('<g transform="scale(0.015625)"/>', "f") == '<g transform="scale(0.01562)"/>'
    assert compact('<path id="a"/><use x="12.345678" href="#b1.2345"/>', "f") == '<path/><use x="12.35" href="#f0"/>'


def test_groups_that_say_nothing_are_left_out_and_no_other():
    svg = '<g id="a"><g><g clip-path="url(#b)"><g/><path d="M 1 2 \nL 3.5 -4 \nz"/></g><use/></g><g class="c"/></g>'
    assert compact(svg, "f") == '<g clip-path="url(#f0)"><path d="M1 2L3.5 -4z"/></g><use/><g class="c"/>'
