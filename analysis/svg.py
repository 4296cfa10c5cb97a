"""Matplotlib's SVG in half of its bytes: the same picture to a hundredth of a point.

Left out are comments, metadata, indentation, ids that nothing refers to, groups that say nothing, blanks in paths and
decimals that no eye sees. References are those of SVG 2, without ``xlink``. Looks that are repeated become classes.
Their names and ids are short and begin with ``prefix``, so that several figures may stand in one page, as in a
notebook.
"""

from __future__ import annotations

import re
from collections import Counter

_NUMBER = re.compile(r"(?<![\w#.-])-?\d+\.\d{3,}(?![\w.])")
_LEFT_OUT = re.compile(r"<!--.*?-->|<metadata>.*?</metadata>| xmlns:xlink=\"[^\"]*\"|\bxlink:(?=href)", re.DOTALL)
_REFERENCE = re.compile(r'(?<=url\(#)[^)]+|(?<=href="#)[^"]+')
_ID = re.compile(r' id="([^"]+)"')
_STYLE = re.compile(r' style="([^"]+)"')
_PATH = re.compile(r'(?<= d=")[^"]+')
_GROUP = re.compile(r"<g(?: [^>/]*)?>\n?|</g>\n?|<g/>\n?")
_MOVED = re.compile(r' transform="translate\((-?[\d.]+) 0\)"/>')


def compact(svg: str, prefix: str) -> str:
    """The figure ``svg`` as matplotlib writes it, made small. The same text and prefix give the same text."""
    plain = _NUMBER.sub(_rounded, _LEFT_OUT.sub("", svg))
    names = {old: f"{prefix}{count}" for count, old in enumerate(dict.fromkeys(_REFERENCE.findall(plain)))}
    plain = _REFERENCE.sub(lambda found: names[found[0]], plain)
    plain = _ID.sub(lambda found: f' id="{names[found[1]]}"' if found[1] in names else "", plain)
    plain = _PATH.sub(lambda found: re.sub(r"\s*([A-Za-z])\s*", r"\1", found[0]), _MOVED.sub(r' x="\1"/>', plain))
    return _classed(_ungrouped(re.sub(r"\s*\n\s*", "\n", plain)), prefix)


def _ungrouped(svg: str) -> str:
    """Without groups that have no attribute."""
    open_groups: list[bool] = []

    def kept(found: re.Match[str]) -> str:
        if found[0].startswith("</"):
            return found[0] if open_groups.pop() else ""
        says = "=" in found[0]
        if not found[0].startswith("<g/"):
            open_groups.append(says)
        return found[0] if says else ""

    return _GROUP.sub(kept, svg)


def _classed(svg: str, prefix: str) -> str:
    counts = Counter(_STYLE.findall(svg))
    names = {look: f"{prefix}s{n}" for n, look in enumerate(look for look, count in counts.items() if count > 1)}
    rules = "".join(f".{name}{{{look}}}" for look, name in names.items())
    svg = _STYLE.sub(lambda found: f' class="{names[found[1]]}"' if found[1] in names else found[0], svg)
    return svg.replace("</style>", f"{rules}</style>", 1)


def _rounded(found: re.Match[str]) -> str:
    """To a hundredth; below one, as scales are, to four digits."""
    number = float(found[0])
    return f"{round(number, 2) if abs(number) >= 1 else float(f'{number:.4g}'):.6g}"
