"""The report of an export: every check run once, through the functions that the commands use, as one dictionary.

A section that cannot run says why, one that breaks says with what, and the rest goes on. What the page shows is in this
dictionary and nowhere else (report_view.py reads it by path), so that its figures can be held against it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from exporter import __version__, console
from exporter.errors import CheckError, InputError
from exporter.manifest import Export, open_export
from validate import report_sections
from validate.memory import per_token
from validate.report_private import Private

PASS, FAIL, DONE, NOT_RUN, SKIPPED = "pass", "fail", "done", "not run", "left out"
Progress = Callable[..., None]


@dataclass(frozen=True)
class Section:
    """One row of the report: what it asks, what it usually takes (`seconds` of one attention on two cores, a `hint` for
    people), and what runs it."""

    name: str
    title: str
    about: str
    seconds: float
    hint: str
    run: Callable[[report_sections.Asked], report_sections.Found]


SECTIONS = (
    Section("configuration", "Configuration", "What was exported, and the sizes that set everything else.", 1,
            "at once", report_sections.configuration),
    Section("graphs", "Graphs", "What each graph takes and gives, and the operators that it is made of.", 2, "at once",
            report_sections.graphs),
    Section("parity", "Parity", "Every graph against a float64 reference that loads the source on its own.", 60,
            "a minute for one attention, minutes for a model", report_sections.parity),
    Section("absorption", "Absorption", "Whether each graph attends its latent cache as it lies.", 3, "seconds",
            report_sections.absorption),
    Section("doctor", "Doctor", "What is wrong with it, if something is: symptom, evidence, cause and cure.", 30,
            "half a minute for one attention, minutes for a model", report_sections.doctor),
    Section("memory", "Memory", "What a cache must hold, and what a step really takes.", 40,
            "up to a minute", report_sections.memory),
    Section("curve", "Memory over context", "Weights, cache, scratch and their peak as the context grows.", 60,
            "up to the --budget", report_sections.curve),
    Section("engines", "Engines", "What the builders reported, beside what was predicted.", 2, "at once",
            report_sections.engines),
    Section("versions", "Versions, and how to do it again", "What ran here, and the commands that show the same.", 2,
            "at once", report_sections.versions))
NAMES = tuple(s.name for s in SECTIONS)


@dataclass(frozen=True)
class ReportRequest:
    """What to report. `only`, `skip`: sections by name; `contexts`, `budget`: of the memory curve; `chunk`: new tokens
    of a prefill."""

    folder: Path
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    seed: int = 0
    batch: int | None = None
    chunk: int = 512
    contexts: str | None = None
    budget: float = 120.0
    chosen: tuple[Section, ...] = field(init=False)

    def __post_init__(self) -> None:
        for option, names in (("--only", self.only), ("--skip", self.skip)):
            unknown = [n for n in names if n not in NAMES]
            if unknown:
                raise InputError(f"{option} {', '.join(unknown)}: expected sections of {', '.join(NAMES)}")
        chosen = tuple(s for s in SECTIONS if (not self.only or s.name in self.only) and s.name not in self.skip)
        if not chosen:
            raise InputError("--only and --skip leave no section; expected one at least")
        object.__setattr__(self, "chosen", chosen)


def collect(request: ReportRequest, progress: Progress = lambda message, share=None: None) -> dict[str, Any]:
    """Run every section that was chosen. InputError where the folder is no export."""
    made = open_export(request.folder)
    asked = report_sections.Asked(made, request.seed, request.batch, request.chunk, request.contexts, request.budget)
    asked.check()
    sections: dict[str, Any] = {}
    total, spent = sum(s.seconds for s in request.chosen), 0.0
    for section in SECTIONS:
        chosen = section in request.chosen
        share = spent / total
        progress(f"{section.title} ({section.hint})", share)
        asked.progress = lambda message, _=None, s=section, at=share: progress(f"{s.title}: {message}", at)
        sections[section.name] = _run(section, asked) if chosen else {
            "title": section.title, "about": section.about, "state": SKIPPED, "says": "", "seconds": 0.0,
            "not_run": [], "data": None}
        spent += section.seconds * chosen
    data = {"export": str(request.folder), "toolkit": __version__, "written": _now(), "about": _about(made),
            **_verdict(sections), "highlights": _highlights(made, sections), "sections": sections}
    cleaned: dict[str, Any] = console.finite(Private(made).cleaned(data))
    return cleaned


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _run(section: Section, asked: report_sections.Asked) -> dict[str, Any]:
    start = time.monotonic()
    try:
        found = section.run(asked)
    except InputError as error:
        found = report_sections.Found(NOT_RUN, "not run", None, [f"{section.title}: not run: {error}"])
    except CheckError as error:
        found = report_sections.Found(FAIL, f"{section.title} failed: {error}", None)
    except Exception as error:  # one section that breaks says nothing of the next
        first = (str(error).strip().splitlines() or [""])[0]
        found = report_sections.Found(FAIL, f"{section.title} broke: {type(error).__name__}: {first}", None)
    return {"title": section.title, "about": section.about, **asdict(found),
            "seconds": round(time.monotonic() - start, 1)}


def _about(made: Export) -> dict[str, Any]:
    return {"model": made.data["model"], "scope": made.contract, "dtype": made.dtype, "cache": made.cache,
            "cache_dtype": made.cache_dtype, "target": made.data["target"], "max_context": made.max_context}


def _verdict(sections: dict[str, Any]) -> dict[str, Any]:
    """pass, fail, or nothing checked; the line that says it, and what was not run."""
    states = [s["state"] for s in sections.values()]
    state = FAIL if FAIL in states else PASS if PASS in states else "nothing checked"
    not_run = list(dict.fromkeys(line for s in sections.values() for line in s["not_run"]))
    said = [s["says"] for s in sections.values() if s["says"] and s["state"] in (PASS, FAIL)]
    verdict = [*said, f"{len(not_run)} not run" if not_run else "", "" if said else "nothing was checked"]
    return {"pass": {PASS: True, FAIL: False}.get(state), "state": state,
            "verdict": [v for v in verdict if v], "not_run": not_run}


# --- the figures that matter most -------------------------------------------------------------------------------------


def _highlights(made: Export, sections: dict[str, Any]) -> list[dict[str, Any]]:
    """The few figures that stand at the head: label, value, its unit as report_view formats it, and a note."""
    found = [_cache(made), _parity(sections["parity"]["data"]), _activation(made, sections), _size(made, sections)]
    return [figure for figure in found if figure is not None]


def _cache(made: Export) -> dict[str, Any] | None:
    if made.cache == "none":
        return None
    figures = per_token(made.config, made.dtype, made.cache_dtype)
    each = {key: figures[f"{key}_bytes_per_token"] * made.attentions for key in ("latent", "expanded")}
    return {"label": "Cache per token", "value": each["latent"], "unit": "bytes", "beside": each["expanded"],
            "ratio": figures["ratio"], "note": "expanded K and V would take"}


def _parity(data: dict[str, Any] | None) -> dict[str, Any] | None:
    counted = [g for g in (data or {}).get("groups", []) if g["counted"]]
    if not counted:
        return None
    worst = max(counted, key=lambda g: (not g["pass"], g["share"]))
    return {"label": "Worst parity, rel", "value": worst["rel"], "unit": "rel",
            "beside": worst["tolerance"], "note": f"{worst['rung']}; tolerance"}


def _activation(made: Export, sections: dict[str, Any]) -> dict[str, Any] | None:
    for backend in (sections["engines"]["data"] or {}).get("backends", []):
        for e in backend["engines"]:
            if e["file"] and "decode" in e["serves"]:
                limits = ", ".join(f"{n} ≤ {r[2]:,}" for n, r in e["limits"].items())
                return {"label": "Decode activation", "value": e["activation_bytes"], "unit": "MB",
                        "beside": e["predicted_bytes"], "note": f"{backend['backend']}, {limits}; predicted"}
    rows = [r for r in (sections["curve"]["data"] or {}).get("rows", [])
            if r["how"] == "measured" and r["subject"].startswith("ONNX Runtime") and r["step"] == "decode"]
    if not rows:
        return None
    last = rows[-1]
    return {"label": "Scratch of a decode step", "value": last["step_bytes"], "unit": "MB", "beside": None,
            "note": f"ONNX Runtime on the CPU, batch {last['batch']} × {last['context']:,}"}


def _size(made: Export, sections: dict[str, Any]) -> dict[str, Any] | None:
    weights = int(made.data["weights"]["bytes"])
    for backend in (sections["engines"]["data"] or {}).get("backends", []):
        kept = [e for e in backend["engines"] if e["file"] and e["plan_bytes"]]
        if kept:
            return {"label": "Engine plans" if len(kept) > 1 else "Engine plan",
                    "value": sum(e["plan_bytes"] for e in kept), "unit": "MB", "beside": weights,
                    "note": f"{backend['backend']}, {len(kept)} on disk; the export's weights"}
    return {"label": "Weights", "value": weights, "unit": "MB", "beside": None,
            "note": f"{made.data['weights']['mode']}, no engines built"}
