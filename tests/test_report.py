"""The report: its figures equal the commands' JSON, its page opens everywhere, and what fails or cannot run is said."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from engines.__main__ import cli as engines_cli
from engines.build import BuildRequest, build
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from exporter.manifest import open_export
from tests.fake_builder import install
from tests.model_checkpoints import tiny_checkpoint
from validate import absorption, eager_memory, memory, memory_curve, report, report_page
from validate.__main__ import cli
from validate.faults import FAULTS
from validate.report import NAMES, ReportRequest, collect
from validate.report_private import Private


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, narrow: list[str]) -> Path:
    """A folder that holds the export `layer`, where commands run."""
    folder = tmp_path_factory.mktemp("private") / "folder"
    folder.mkdir()
    export(ExportRequest("narrow-deepseek-v2-lite", folder / "layer", max_context=128))
    return folder


@pytest.fixture(scope="module")
def quick_memory() -> Iterator[None]:
    """The points that would each load torch, and the engines that would be built, are not this file's subject."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_curve, "measured", lambda c, f, d, batch, rows, *_: eager_memory.EagerMemory(
            2_000_000, 1000 * rows, 500 * rows + len(f), 2_000_000 + 1500 * rows, 1, 1))
        patch.setattr(memory.trt, "available", lambda name: False)
        yield


@pytest.fixture(scope="module")
def whole(home: Path, quick_memory: None) -> tuple[str, dict[str, Any]]:
    """The page of every section, and what --json printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        call = CliRunner().invoke(cli, ["report", "layer", "--out", "a.html", "--contexts", "32,128", "--chunk", "16",
                                        "--json"])
    assert call.exit_code == 0, call.output
    return (home / "a.html").read_text(), json.loads(call.stdout)


class Page(HTMLParser):
    """Figures (path, form, text), ids, tags, and whatever an attribute refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []
        self.words = ""
        self._figure: tuple[str, str] | None = None
        self._silent = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.tags[tag] += 1
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[a] for a in ("href", "src", "xlink:href", "action", "data") if a in found]
        self._silent = tag in ("script", "style")
        if "data-path" in found:
            self._figure = (found["data-path"], found["data-form"])

    def handle_endtag(self, tag: str) -> None:
        self._silent = False
        self._figure = None if tag == "span" else self._figure

    def handle_data(self, data: str) -> None:
        if self._figure is not None:
            self.figures.append((*self._figure, data))
        if not self._silent:
            self.words += data


def at(data: Any, path: str) -> Any:
    for step in path.split("."):
        data = data[int(step)] if isinstance(data, list) else data[step]
    return data


def agrees(value: Any, form: str, text: str) -> bool:
    """Whether a figure on the page is the value, to the digits that it shows; read back, not written anew."""
    if value is None:
        return text == "–"
    name, _, decimals = form.partition(":")
    shown = float(text.replace(",", "").removesuffix("\u00a0%").removesuffix("\u00a0×"))
    factor = {"mb": 1e-6, "kb": 1e-3, "percent": 100.0}.get(name, 1.0)
    meant = 1 - value if name == "one-minus" else value * factor
    if name == "int":
        return shown == value
    if name in ("exp", "one-minus"):
        return shown == pytest.approx(meant, rel=0.051 if name == "exp" else 0.51, abs=1e-300)
    return abs(shown - meant) <= 0.5001 * 10 ** -int(decimals or {"times": 1}.get(name, 0))


def invoke(arguments: list[str], group: Any = cli) -> tuple[int, dict[str, Any]]:
    call = CliRunner().invoke(group, [*arguments, "--json"])
    return call.exit_code, json.loads(call.stdout)


# --- figures --------------------------------------------------------------------------------------------------------


def test_every_figure_is_in_the_data_that_the_page_holds(whole: tuple[str, dict[str, Any]]) -> None:
    text, printed = whole
    held = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])
    assert held == printed
    figures = Page(text).figures
    assert len(figures) > 200
    wrong = [(path, form, shown, at(held, path)) for path, form, shown in figures
             if not agrees(at(held, path), form, shown)]
    assert not wrong
    assert {path.split(".")[1] for path, _, _ in figures if path.startswith("sections.")} >= {
        "configuration", "graphs", "parity", "absorption", "memory", "curve"}


def test_no_figure_stands_in_a_table_but_from_the_data(whole: tuple[str, dict[str, Any]]) -> None:
    """Cells of columns of figures are figures with a path; a number typed into a page would have none."""
    cells = re.findall(r'<td role="cell"[^>]*class="n"[^>]*>(.*?)</td>', whole[0], re.S)
    assert len(cells) > 150
    assert all("data-path=" in cell for cell in cells)


def test_sections_hold_what_the_commands_print(whole: tuple[str, dict[str, Any]], home: Path, quick_memory: None,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    sections = {name: s["data"] for name, s in whole[1]["sections"].items()}
    _, parity = invoke(["parity", "layer"])
    assert {key: sections["parity"][key] for key in parity} == parity
    assert invoke(["absorption", "layer"])[1] == sections["absorption"]
    assert invoke(["doctor", "layer"])[1] == sections["doctor"]
    _, found = invoke(["memory", "layer", "--chunk", "16", "--contexts", "32,128"])
    for key in ("latent_bytes_per_token", "cache_bytes", "eager"):
        assert found[key] == sections["memory"][key]
    formulas = [{k: r[k] for k in r if "formula" in k or k in ("subject", "context", "how")}
                for r in sections["curve"]["rows"]]
    assert formulas == [{k: r[k] for k in formulas[0]} for r in found["curve"]["rows"]]


def test_the_verdict_and_the_figures_at_the_head(whole: tuple[str, dict[str, Any]], home: Path) -> None:
    _, data = whole
    counted = sum(r["counted"] for r in data["sections"]["parity"]["data"]["rungs"])
    assert data["verdict"][:3] == [f"{counted} rungs pass", "absorption in effect", "the doctor finds no fault"]
    assert data["verdict"][3] == f"{len(data['not_run'])} not run"
    assert data["state"] == "pass"
    made = open_export(home / "layer")
    cache, parity, scratch, weights = data["highlights"]
    assert (cache["value"], cache["beside"]) == (made.cache_bytes_per_token, 4 * made.config.expanded_dim)
    assert parity["value"] <= parity["beside"]
    assert scratch["note"].startswith("ONNX Runtime on the CPU")
    assert weights["value"] == made.data["weights"]["bytes"]
    words = " ".join(Page(whole[0]).words.split())
    assert all(part in words for part in data["verdict"])
    assert all(line in words for line in data["not_run"])
    assert "eager MLA and MHA on CUDA: not run: no CUDA device" in data["not_run"]
    assert any(line.startswith("cache of one more token: not measured") for line in data["not_run"])


def test_engines_stand_beside_their_prediction(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch)
    fake.activation = lambda call: 40_000_000 if "decode" in call.graph else 90_000_000
    made = export(ExportRequest("narrow-deepseek-v2-lite", tmp_path / "e", dtype="fp16", max_context=128,
                                target="trt-rtx"))
    build(BuildRequest(made.folder, "trt-rtx", max_batch=2, max_context=128, chunk=16))
    data = collect(ReportRequest(made.folder, only=("engines", "versions", "configuration")))
    _, printed = invoke(["inspect", str(made.folder)], engines_cli)
    (ours,), (theirs,) = data["sections"]["engines"]["data"]["backends"], printed["builds"]
    assert {k: v for k, v in ours.items() if k != "engines"} == {k: v for k, v in theirs.items() if k != "engines"}
    for e, recorded in zip(ours["engines"], theirs["engines"], strict=True):
        assert recorded.items() <= e.items()
        assert e["of_predicted"] == e["activation_bytes"] / e["predicted_bytes"]
    activation, plans = (next(h for h in data["highlights"] if h["label"].startswith(label))
                         for label in ("Decode activation", "Engine plan"))
    assert activation["value"] == 40_000_000
    assert plans["value"] == sum(e["plan_bytes"] for e in ours["engines"] if e["file"])
    page = Page(report_page.html(data))
    assert not [f for f in page.figures if not agrees(at(data, f[0]), f[1], f[2])]
    assert f"python -m engines build {made.folder} --backend trt-rtx --max-batch 2 --max-context 128" in page.words
    kept = made.folder / "engines" / "trt-rtx" / str(next(e["file"] for e in ours["engines"] if e["file"]))
    kept.write_bytes(b"other")
    broken = collect(ReportRequest(made.folder, only=("engines",)))
    assert broken["state"] == "fail"
    assert broken["verdict"] == ["engines of trt-rtx damaged or stale"]


# --- what fails, what cannot run --------------------------------------------------------------------------------------


def test_a_planted_fault_is_red_and_the_page_is_written(tmp_path: Path, narrow: list[str]) -> None:
    export(ExportRequest("narrow-deepseek-v2-lite", tmp_path / "e", max_context=128),
           tamper=FAULTS["kv-b-order"].tamper)
    call = CliRunner().invoke(cli, ["report", str(tmp_path / "e"), "--out", str(tmp_path / "a.html"), "--only",
                                    "parity,absorption"])
    assert isinstance(call.exception, CheckError)
    assert re.fullmatch(r"\d+ of \d+ rungs FAIL, absorption in effect, \d+ not run; the page is .*a\.html",
                        str(call.exception))
    text = (tmp_path / "a.html").read_text()
    words = Page(text).words
    assert "✗" in words
    assert re.search(r"Red rungs\s*weights: worst", words)
    assert "more, among all rungs below" in words
    assert 'class="verdict fail"' in text
    code, data = invoke(["report", str(tmp_path / "e"), "--out", str(tmp_path / "b.html"), "--only", "doctor"])
    assert (code, data["pass"]) == (1, False)
    (finding,) = data["sections"]["doctor"]["data"]["findings"]
    assert data["verdict"] == [f"the doctor finds {finding['name']}"]
    words = Page((tmp_path / "b.html").read_text()).words
    assert all(finding[key] in words for key in ("name", "symptom", "evidence", "cause", "cure"))


def test_a_source_that_is_gone_is_said(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "m", "v2-lite", layers=2)
    export(ExportRequest(str(tmp_path / "m"), tmp_path / "e", layer=1, max_context=64))
    shutil.rmtree(tmp_path / "m")
    code, data = invoke(["report", str(tmp_path / "e"), "--out", str(tmp_path / "a.html"), "--skip",
                         "curve,memory,doctor"])
    parity = data["sections"]["parity"]
    assert (code, parity["state"], data["state"]) == (0, "not run", "pass")
    assert "is gone; parity compares with the source" in " ".join(parity["not_run"])
    assert f"{tmp_path / 'm'}" not in (tmp_path / "a.html").read_text()
    assert data["verdict"] == ["absorption in effect", f"{len(data['not_run'])} not run"]


def test_a_section_that_breaks_is_a_fault_of_its_own(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                     ) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of <luck>\nmore")

    monkeypatch.setattr(absorption, "audit", broken)
    code, data = invoke(["report", str(home / "layer"), "--out", str(tmp_path / "a.html"), "--only",
                         "absorption,graphs"])
    assert code == 1
    assert data["sections"]["absorption"]["says"] == "Absorption broke: RuntimeError: out of <luck>"
    assert data["sections"]["graphs"]["data"]["graphs"]
    text = (tmp_path / "a.html").read_text()
    assert "<luck>" not in text
    assert "out of <luck>" in Page(text).words


def test_nothing_checked_is_no_pass(home: Path) -> None:
    data = collect(ReportRequest(home / "layer", only=("configuration",)))
    assert (data["pass"], data["state"], data["verdict"]) == (None, "nothing checked", ["nothing was checked"])
    assert "Left out on request: Graphs, Parity" in " ".join(Page(report_page.html(data)).words.split())


@pytest.mark.parametrize(("request_of", "sections"), [
    ({"cache_dtype": "int8", "target": "trt-rtx", "dtype": "fp16"}, ("configuration", "graphs", "absorption")),
    ({"quantise": "int4", "dtype": "fp16"}, ("configuration", "graphs", "parity")),
    ({"causal": False}, ("configuration", "graphs", "absorption", "parity")),
    ({"cache": "scatter"}, ("configuration", "absorption"))])
def test_other_exports(request_of: dict[str, Any], sections: tuple[str, ...], tmp_path: Path, narrow: list[str]
                       ) -> None:
    made = export(ExportRequest("narrow-deepseek-v2-lite", tmp_path / "e", max_context=128, **request_of))
    data = collect(ReportRequest(made.folder, only=sections))
    assert data["state"] in ("pass", "nothing checked"), data["verdict"]
    page = Page(report_page.html(data))
    assert not [f for f in page.figures if not agrees(at(data, f[0]), f[1], f[2])]
    if made.cache == "none":
        assert data["sections"]["absorption"]["state"] == "not run"
        assert "has no cache, so there is nothing to absorb into" in page.words


def test_a_whole_model(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "m", "v3", layers=2)
    made = export(ExportRequest(str(tmp_path / "m"), tmp_path / "e", max_context=64))
    shutil.move(tmp_path / "m", tmp_path / "n")
    data = collect(ReportRequest(made.folder, chunk=8, skip=("curve",)))
    assert data["state"] == "pass", data["verdict"]  # its graphs are held against one another
    assert "its source m/model.safetensors is gone" in " ".join(data["not_run"])
    page = Page(report_page.html(data))
    assert not [f for f in page.figures if not agrees(at(data, f[0]), f[1], f[2])]
    assert "past_latent.0 … past_latent.1" in page.words
    assert data["highlights"][0]["value"] == 2 * data["sections"]["memory"]["data"]["latent_bytes_per_token"]
    assert str(tmp_path / "m") not in report_page.html(data)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_asks_for_nothing(whole: tuple[str, dict[str, Any]]) -> None:
    text, _ = whole
    page = Page(text)
    assert [link for link in page.links if not link.startswith("#")] == ["data:,"]
    bare = re.sub(r"http://www\.w3\.org/(2000/svg|1999/xlink)", "", text)
    assert "://" not in bare
    assert "@import" not in bare
    assert not re.search(r"url\((?!#)", bare)
    assert len(page.ids) == len(set(page.ids))
    assert page.tags["h1"] == 1
    assert page.tags["table"] == page.tags["caption"] > 5
    assert page.tags["svg"] >= 4
    assert set(re.findall(r'href="#([\w-]+)"', text)) <= set(page.ids)


def test_no_path_of_this_machine_is_told(whole: tuple[str, dict[str, Any]], home: Path) -> None:
    assert str(home) not in whole[0]
    assert str(Path.home()) + "/" not in whole[0]
    assert "report of <code>layer</code>" in whole[0]


@pytest.mark.parametrize(("given", "text", "told"), [
    ("models/x-out", "models/x-out: its source HERE/models/x/a.safetensors is gone", "models/x-out: its source x/a.s"),
    ("e", "HERE/e/engines, e and HERE/secret.txt of the rest", "e/engines, e and secret.txt of the rest"),
    ("HERE/models/x-out", "HERE/models/x-out/a.onnx beside HERE/models/x", "HERE/models/x-out/a.onnx beside x"),
    ("e", "HOME/.cache/a, TMP/b.onnx", "~/.cache/a, TMP/b.onnx")])
def test_paths_become_names(given: str, text: str, told: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    made = open_export(home / "layer")
    source = {"kind": "checkpoint", "path": str(home / "models" / "x")}
    moved = replace(made, folder=Path(given.replace("HERE", str(home))), data={**made.data, "source": source})
    full = text.replace("HERE", str(home)).replace("HOME", str(Path.home())).replace("TMP", tempfile.gettempdir())
    assert Private(moved).text(full).startswith(told.replace("HERE", str(home)))


@pytest.mark.parametrize(("arguments", "words"), [
    (["--out", "there.html"], "--out there.html exists; choose another name, or pass --overwrite"),
    (["--out", "layer"], "--out layer is a folder; expected the name of a file, such as layer/report.html"),
    (["--out", "none/a.html"], "there is no folder none; make it first"),
    (["--only", "parity,nothing"], "--only nothing: expected sections of configuration, graphs, parity"),
    (["--skip", ",".join(NAMES)], "leave no section"), (["--contexts", "9999"], "numbers from 2 to 128"),
    (["--chunk", "0"], "--chunk 0")])
def test_what_is_refused_before_anything_runs(arguments: list[str], words: str, home: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    (home / "there.html").write_text("mine")
    before = sorted(p.name for p in home.iterdir())
    call = CliRunner().invoke(cli, ["report", "layer", *arguments])
    assert isinstance(call.exception, InputError)
    assert words in str(call.exception)
    assert (home / "there.html").read_text() == "mine"
    assert sorted(p.name for p in home.iterdir()) == before


def test_overwrite_and_what_is_no_export(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.html"
    out.write_text("old")
    call = CliRunner().invoke(cli, ["report", str(home / "layer"), "--out", str(out), "--only", "graphs",
                                    "--overwrite"])
    assert call.exit_code == 0
    assert out.read_text().startswith("<!doctype html>")
    assert f"written: {out}" in call.output
    call = CliRunner().invoke(cli, ["report", str(tmp_path), "--out", str(tmp_path / "b.html")])
    assert isinstance(call.exception, InputError)
    assert not (tmp_path / "b.html").exists()


def test_an_interrupted_report_leaves_nothing(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(data: dict[str, Any]) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(report_page, "html", stop)
    with pytest.raises(KeyboardInterrupt):
        report_page.write({}, tmp_path / "a.html")
    assert not list(tmp_path.glob("*.html"))
    assert report.SECTIONS[0].name == NAMES[0]


# --- in a browser -----------------------------------------------------------------------------------------------------

CONTRAST = """() => {
  const parse = (c) => { const n = (c.match(/[\\d.]+/g) || []).map(Number); return [...n.slice(0, 3), n[3] ?? 1] }
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0)
  const behind = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor)
    if (c[3] > 0) return c } return [255, 255, 255] }
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), low = []
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement
    const unseen = ["SCRIPT", "STYLE", "TITLE", "DESC"].includes(e.tagName.toUpperCase())
    if (unseen || !walker.currentNode.data.trim()) continue
    const drawn = getComputedStyle(e), ink = parse(e.closest("svg") ? drawn.fill : drawn.color)
    const [a, b] = [light(ink), light(behind(e))].sort((x, y) => y - x)
    if ((a + .05) / (b + .05) < 4.5) low.push(walker.currentNode.data.trim() + " " + ink)
  }
  return low
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    library = pytest.importorskip("playwright.sync_api", reason="playwright is of the extra `test`")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium is installed: the page is not looked at")
    with library.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=found, args=["--no-sandbox"])  # CI runs as root
        yield opened
        opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(browser: Any, whole: tuple[str, dict[str, Any]], tmp_path: Path, scheme: str) -> None:
    file = tmp_path / "a.html"
    file.write_text(whole[0])
    said: list[str] = []
    page = browser.new_page(color_scheme=scheme)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(("file://", "data:")) else said.append(asked.url))
    for width in (360, 768, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(file.as_uri())
        for opened in (False, True):
            page.evaluate("(open) => document.querySelectorAll('details').forEach((d) => { d.open = open })", opened)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (width, opened)
        wide = "[...document.querySelectorAll('.fits')].filter((e) => e.scrollWidth > e.clientWidth).length"
        assert page.evaluate(wide) == 0, "a table that should fit does not"
    assert not page.evaluate(CONTRAST)
    assert not said
    page.close()


def test_the_page_without_scripts_and_on_paper(browser: Any, whole: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "a.html"
    file.write_text(whole[0])
    bare = browser.new_context(java_script_enabled=False, color_scheme="dark").new_page()
    bare.goto(file.as_uri())
    for section in NAMES:
        assert bare.locator(f"section#{section}").is_visible()
    bare.locator("section#parity summary").first.click()
    assert bare.locator("section#parity details table").first.is_visible()
    bare.close()
    page = browser.new_page(color_scheme="dark")
    page.goto(file.as_uri())
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.querySelector('h1')).color") == "rgb(31, 35, 40)"
    assert page.evaluate("getComputedStyle(document.querySelector('svg text')).fill") != "rgb(230, 237, 243)"
    folded = page.evaluate("document.querySelector('#parity details table').getBoundingClientRect().height")
    assert folded > 100, "what is folded on the screen is printed"
    paper = page.pdf(format="A4", prefer_css_page_size=True)
    assert paper.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", paper)) >= 3
    page.close()
