"""How the parity ladder looks on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from exporter import console

if TYPE_CHECKING:
    from rich.console import Console

    from validate.against_mha import Comparison
    from validate.ladder import Ladder, Rung
    from validate.layer_search import Part, Search

Column = tuple[str, Callable[["Rung", "list[Rung]"], str]]


def ladder(out: Console, climbed: Ladder, show_all: bool) -> None:
    """Every rung with all its figures, or per runtime and graph the one that came closest to failing; then what was
    not run, and of every red rung where it is worst."""
    groups: dict[tuple[str, ...], list[Rung]] = {}
    for r in climbed.rungs:
        runtime = r.name.split("/")[0]
        groups.setdefault((r.name if show_all else runtime, r.graph, r.cache, r.dtype), []).append(r)
    worst = [(max(rungs, key=lambda r: (not r.passed, r.rel / max(r.tolerance, 1e-30))), rungs)
             for rungs in groups.values()]
    columns = _columns(climbed, show_all)
    console.table(out, _title(climbed), [name for name, _ in columns],
                  [[cell(r, rungs) for _, cell in columns] for r, rungs in worst])
    _remarks(out, climbed, [r for r, _ in worst], show_all)
    if climbed.layers is not None:
        out.print()
        layers(out, climbed.layers, show_all)
    failed = sorted({r.name for r in climbed.rungs if r.counted and not r.passed})
    verdict = "[green]pass[/green]" if climbed.passed else f"[red]FAIL[/red]: {', '.join(failed)}"
    out.print(f"{len(climbed.rungs)} rungs: {verdict}")


def _forms(climbed: Ladder) -> tuple[list[str], list[str]]:
    """The cache forms and dtypes among the rungs."""
    return ([*dict.fromkeys(r.cache for r in climbed.rungs)], [*dict.fromkeys(r.dtype for r in climbed.rungs)])


def _title(climbed: Ladder) -> str:
    caches, dtypes = _forms(climbed)
    same = "".join(f", {words[0]}{what}" for words, what in ((dtypes, ""), (caches, " cache")) if len(words) == 1)
    return f"Parity{same}: rel = max|a - b| / std(float64 reference)"


def _columns(climbed: Ladder, show_all: bool) -> list[Column]:
    """What is the same in every row stands in the title, and what is nowhere said in no column."""
    caches, dtypes = _forms(climbed)
    whole = any(getattr(r, "top1", None) is not None for r in climbed.rungs)
    return [
        ("rung", lambda r, rungs: r.name if len(rungs) == 1 else f"{r.name} (of {len(rungs)})"),
        ("graph", lambda r, rungs: r.graph),
        *([("cache", lambda r, rungs: r.cache)] if len(caches) > 1 else []),
        *([("dtype", lambda r, rungs: r.dtype)] if len(dtypes) > 1 else []),
        ("rel", lambda r, rungs: f"{r.rel:.1e}"),
        ("limit", lambda r, rungs: f"{max(r.tolerance, 0):.0e}"),
        *([("max error", lambda r, rungs: f"{r.max_abs:.1e}"),
           ("mean error", lambda r, rungs: f"{r.mean_abs:.1e}")] if show_all else []),
        ("1 - cos", lambda r, rungs: f"{1 - r.cosine:.0e}"),
        *([("top-1", _top1), ("KL", _kl)] if whole else []),
        *([("left out", _left_out)] if any(getattr(r, "excluded", 0) for r in climbed.rungs) else []),
        ("", lambda r, rungs: ("pass" if r.passed else "FAIL") + ("" if r.counted else " (not counted)")),
        *([("", lambda r, rungs: "; ".join(filter(None, (r.note, r.where))))] if show_all else [])]


def _remarks(out: Console, climbed: Ladder, shown: list[Rung], show_all: bool) -> None:
    notes = [] if show_all else [f"{r.name}: {r.note}" for r in shown if r.note and r.passed and r.graph == "-"]
    notes += climbed.not_run
    if any(not r.counted for r in climbed.rungs):
        notes.append("not counted: ONNX Runtime's CPU computes 16-bit products in float32, so it cannot judge them")
    console.note_list(out, notes)
    red = dict.fromkeys(_red(r) for r in (climbed.rungs if show_all else shown) if not r.passed and r.counted)
    for line in red if show_all else list(red)[:RED]:
        out.print(line, soft_wrap=True, highlight=False)
    if len(red) > RED and not show_all:
        out.print(f"and {len(red) - RED} more graphs; --all prints every rung", highlight=False)


def _red(r: Rung) -> str:
    """Where a red rung is worst, the same line for the same fault of several exports."""
    place = "" if r.graph == "-" else f", {r.graph} ({r.cache}, {r.dtype})"
    words = "; ".join(filter(None, (r.note, r.where))) or f"rel {r.rel:.1e}"
    return f"[red]{r.name}[/red]{place}: {words}"


def layers(out: Console, found: Search, show_all: bool) -> None:
    """One row for each graph and part that departs, with those around it, or for every one; then the verdict."""
    shown = {i for i, p in enumerate(found.parts) if show_all or p.departs}
    if not show_all:
        same = {g: [i for i, p in enumerate(found.parts) if p.graph == g] for g in {p.graph for p in found.parts}}
        for each in same.values():
            departing = [place for place, i in enumerate(each) if found.parts[i].departs][:RED]
            shown |= {each[n] for place in departing for n in (place - 1, place + 1) if 0 <= n < len(each)}
            shown |= {i for i in each if len(each) <= RED}
    rows = [[p.name, p.graph, *(_rel(p, what) for what in ("rows", "output", "sum")), p.tokens, p.excluded,
             f"{p.departs} FAIL" if p.departs else "pass"]
            for p in (found.parts[i] for i in sorted(shown, key=lambda i: (found.parts[i].graph, i)))]
    if rows:
        console.table(out, f"Layers, each alone in {found.runtime}: rel to the float64 reference, at most "
                      f"{found.tolerance:.0e}",
                      ["part", "graph", "cache rows", "output", "stream", "tokens", "left out", ""], rows)
    sound = [p for p in found.parts if not p.departs]
    worst = f", rel at most {max(p.rel for p in sound):.1e}" if sound else ""
    console.note_list(out, [f"{len(sound)} of {len(found.parts)} parts are right{worst}", *found.notes])
    for p in found.departing if show_all else found.departing[:RED]:
        told = p.differences.get("rows" if p.departs == "cache rows" else p.departs)
        words = p.note if told is None else f"{p.departs}: {told.sentence}"
        out.print(f"[red]{p.name}[/red], {p.graph}: {words}", soft_wrap=True, highlight=False)
    out.print(("[red]FAIL[/red]: " if found.departing else "") + found.verdict, soft_wrap=True, highlight=False)


def against(out: Console, found: Comparison, show_all: bool) -> None:
    """One row for each attention, or the worst of many; caches beside each other."""
    rows = found.rows if show_all or len(found.rows) <= RED else [
        max(found.rows, key=lambda r: (not r.passed, r.rel / r.tolerance))]
    label = "" if len(rows) == len(found.rows) else f" (worst of {len(found.rows)})"
    console.table(out, f"{found.model} against the multi-head attention of the same width, composed of its weights",
                  ["attention", "", "rel", "limit", "max error", "1 - cos", "article's verdict", ""],
                  [[f"{r.attention}{label}", r.what, f"{r.rel:.1e}", f"{r.tolerance:.0e}", f"{r.max_abs:.1e}",
                    f"{1 - r.cosine:.0e}", r.verdict, "pass" if r.passed else "FAIL"] for r in rows])
    out.print(f"a token's cache in one attention, {found.dtype}: MLA {found.mla_bytes} B, MHA {found.mha_bytes} B, "
              f"{found.mha_bytes / found.mla_bytes:.1f} times as much", highlight=False)
    console.note_list(out, ["where the latent has a norm, K and V are composed behind it: its gain lies in the "
                            "matrices, and 1/rms multiplies what they give", *found.not_run])
    for r in (r for r in rows if not r.passed):
        out.print(f"[red]{r.attention}[/red], {r.what}: {r.where}", soft_wrap=True, highlight=False)


def _rel(part: Part, what: str) -> str:
    return f"{part.differences[what].rel:.1e}" if what in part.differences else "–"


RED = 12  # red rungs, and layers, that a summary explains


def _worst(name: str, rungs: list[Rung], pick: Callable[[list[float]], float]) -> float | None:
    found = [v for r in rungs if (v := getattr(r, name, None)) is not None]
    return pick(found) if found else None


def _top1(r: Rung, rungs: list[Rung]) -> str:
    share = _worst("top1", rungs, min)
    return "–" if share is None else f"{100 * share:.0f} %"


def _kl(r: Rung, rungs: list[Rung]) -> str:
    nats = _worst("kl", rungs, max)
    return "–" if nats is None else f"{nats:.0e}"


def _left_out(r: Rung, rungs: list[Rung]) -> str:
    """Tokens left out of all that were to be compared."""
    excluded, tokens = (sum(getattr(r, n, 0) for r in rungs) for n in ("excluded", "tokens"))
    return f"{excluded} of {excluded + tokens}" if excluded else "0"
