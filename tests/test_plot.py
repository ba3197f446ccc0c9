"""Charts: every point inside, every figure in words, colours that follow the reader, pictures that share a page."""

from __future__ import annotations

import re
import warnings
from xml.etree import ElementTree

import pytest

from validate.plot import STYLE, Line, Panel, described, rows_label, svg
from validate.plot_bars import Bar, Bars

SVG = "{http://www.w3.org/2000/svg}"
PANELS = [Panel("a & b", [Line("one", [(10, 3), (20, 3), (4000, 3)], ["1", "2", "3"])], "x"),
          Panel("log", [Line("one", [(10, 1e-7), (20, 0), (4000, 5)])], "x", log=True),
          Panel("none", [Line("one", [(10, 0), (20, float("nan"))])], "x", log=True),
          Panel("mark", [Line("one", [(10, 0.2), (20, 0.5)]), Line("two", [(10, 0.3)], dashed=True)], "x", mark=0.95),
          Panel("zero", [Line("one", [(512, 5), (32768, 5.2)])], "context, tokens", "MB", zero=True, log_x=True)]
POINTS = {"a & b": 3, "log": 2, "none": 0, "mark": 3, "zero": 2}


def texts(drawn: str) -> list[str]:
    return ["".join(t.itertext()) for t in ElementTree.fromstring(drawn).iter(f"{SVG}text")]


@pytest.mark.parametrize("panel", PANELS, ids=lambda p: p.title)
def test_a_chart_keeps_every_point_inside(panel: Panel) -> None:
    drawn = svg("t < u", [panel], alone=False)
    root = ElementTree.fromstring(drawn)
    left, top, width, height = (float(n) for n in root.attrib["viewBox"].split())
    dots = [(float(u.attrib["x"]), float(u.attrib["y"])) for g in root.iter(f"{SVG}g")
            if "clip-path" not in g.attrib and g.attrib.get("id", "").startswith("plot-line2d")
            for u in g.iter(f"{SVG}use")]
    in_legend = len(panel.lines) if len(panel.lines) > 1 else 0
    assert len(dots) == POINTS[panel.title] + in_legend
    assert all(left < x < left + width and top < y < top + height for x, y in dots)
    assert "t < u" in "".join(root.find(f"{SVG}title").itertext())  # type: ignore[union-attr]


def test_names_are_shown_as_they_are() -> None:
    panel = Panel("a $b$ c_d < 模型", [Line("$x^2$", [(1, 2)]), Line("y", [(1, 3)])], "x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        words = texts(svg("$\\alpha$", [panel]))
    assert {"a $b$ c_d < 模型", "$x^2$", "$\\alpha$"} <= set(words)


def test_what_a_chart_says() -> None:
    words = texts(svg("head", PANELS))
    assert {"head", "a & b", "log", "none: no figures", "1", "2", "3", "512", "32k", "MB", "two"} <= set(words)
    told = described(PANELS)
    assert "zero, MB, over context, tokens: one: from 5 at 512 to 5.2 at 32,768." in told
    assert "none, over x: no figures." in told


@pytest.mark.parametrize("count", [1, 2, 8])
def test_bars_are_stacked_in_one_order(count: int) -> None:
    names = ["first piece", "second", "a piece of nothing", "others"]
    bars = Bars("a & b", [Bar(f"case {i}", [3 + i, 2, 0, 0.01]) for i in range(count)], names, "ms")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = svg("t", [bars, bars], columns=1)
    assert drawn == svg("t", [bars, bars], columns=1)
    root = ElementTree.fromstring(drawn)
    _, _, width, height = (float(n) for n in root.attrib["viewBox"].split())
    assert (width, height) == (bars.size[0], 2 * bars.size[1] + 34)
    words = texts(drawn)
    assert {"a & b", "ms", "case 0", *names, f"{4.01 + count:.3g}"} <= set(words)
    assert words.count("second") == 2 * (count + 1)  # in the bars with room for it, and in the legend
    assert "a & b, ms: case 0: 5.01, of it first piece 3, second 2, others 0.01" in described([bars])
    for path in root.iter(f"{SVG}path"):
        if "var(--plot-line" in path.attrib.get("style", "") and "fill" in path.attrib["style"]:
            corners = [float(n) for n in re.findall(r"-?[\d.]+", path.attrib["d"])]
            assert all(0 <= x <= width for x in corners[0::2])
            assert all(0 <= y <= height for y in corners[1::2])
    assert "var(--plot-note" in drawn
    assert "#0a0b" not in drawn


def test_colours_follow_the_reader() -> None:
    alone, part = svg("t", PANELS), svg("t", PANELS, alone=False)
    assert "prefers-color-scheme: dark" in alone
    assert "<style" not in part
    for drawn in (alone, part):
        assert "#0a0b" not in drawn  # no placeholder is left
        used = set(re.findall(r"var\((--plot-[\w-]+)", drawn))
        assert {"--plot-ink", "--plot-note", "--plot-grid", "--plot-mark", "--plot-line-0", "--plot-line-1"} <= used
        assert all(f"{name}: " in STYLE for name in used)
        colours = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", re.sub(r"<style>.*?</style>", "", drawn, flags=re.S)))
        assert all(c == "none" or c.startswith("var(") for c in colours), colours


def test_pictures_share_a_page() -> None:
    first, second = (svg("t", PANELS, prefix=p, alone=False) for p in ("a", "b"))
    ids = [set(re.findall(r'\bid="([^"]+)"', drawn)) for drawn in (first, second)]
    assert not ids[0] & ids[1]
    for drawn, own in zip((first, second), ids, strict=True):
        wanted = re.findall(r'(?:href="#|url\(#)([^")]+)', drawn)
        assert wanted
        assert set(wanted) <= own
        assert set(re.search(r'aria-labelledby="([^"]+)"', drawn)[1].split()) <= own  # type: ignore[index]


def test_a_chart_is_the_same_each_time_and_asks_nothing_of_a_network() -> None:
    drawn = svg("t", PANELS)
    assert drawn == svg("t", PANELS)
    rest = drawn.replace("http://www.w3.org/2000/svg", "").replace("http://www.w3.org/1999/xlink", "")
    assert "://" not in rest


@pytest.mark.parametrize(("count", "words"), [(512, "512"), (1024, "1k"), (1536, "1.5k"), (32768, "32k"),
                                              (1000, "1000"), (163840, "160k")])
def test_contexts_as_engineers_say_them(count: int, words: str) -> None:
    assert rows_label(count) == words
