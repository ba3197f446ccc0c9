"""Tables for people: how the results of `python -m validate` look on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exporter import console

if TYPE_CHECKING:
    from rich.console import Console

    from validate.absorption import Verdict

CURVE = ("weights", "cache", "step", "peak")


def absorption(out: Console, verdicts: list[Verdict]) -> None:
    """One row a graph, what it costs; then every finding with the first of its nodes."""
    from validate.absorption_costs import CONTEXT

    def against(figure: float, reference: float | None, unit: str) -> str:
        return f"{figure:,.0f} {unit}" + (f" ({figure / reference:.2f}x)" if reference else "")

    rows, places = [], dict[str, list[str]]()
    for v in verdicts:
        c, at = v.costs.to_dict(), v.absorbed_at
        places.setdefault(", ".join(f"{what} at {node}" for what, node in sorted(at.items())), []).append(v.graph)
        rows.append([v.graph, v.kind, v.judged, v.attentions,
                     against(c["cache_bytes_per_token"], c["absorbed_cache_bytes_per_token"], "B"),
                     against(c["flops_per_step"], c["absorbed_flops_per_step"], ""),
                     "pass" if v.passed else "FAIL"])
    console.table(out, "Absorption (in brackets: against the absorbed form of the same sizes)",
                  ["graph", "kind", "held to", "attentions", "cache per token", f"flops, a token over {CONTEXT}", ""],
                  rows)
    found = [[v.graph, f.code, f.where, f.text, f.nodes[0] + (f" and {len(f.nodes) - 1} more" if f.nodes[1:] else "")
              if f.nodes else "–"] for v in verdicts for f in v.findings]
    if found:
        console.table(out, "Findings", ["graph", "code", "attention", "", "node"], found)
    console.note_list(out, [*(f"{place}: {', '.join(graphs)}" for place, graphs in places.items() if place),
                            *(f"{v.graph}: {note}" for v in verdicts for note in v.notes)])


def precision(out: Console, d: dict[str, Any]) -> None:
    """One row a variant: bytes, errors of attn_output, and the decode engine."""
    rows = []
    for v in d["variants"]:
        built = [console.size(v[k]) if v[k] is not None else "–" for k in ("plan_bytes", "activation_bytes")]
        errors = [f"{e:.1e}" for e in (v["rel"], v["max_abs"], v["mean_abs"], 1 - v["cosine"])]
        rows.append([v["name"], v["dtype"], console.size(v["weight_bytes"]), f"{v['cache_bytes_per_token']} B", *errors,
                     *built])
    console.table(out, f"Precision of {d['model']}: one attention, {d['context']} rows of past, worst of {d['seeds']} "
                  "seed(s) against float64", ["variant", "dtype", "weights", "cache per token", "rel", "max error",
                                              "mean error", "1 - cos", "plan", "activation"], rows)
    notes = [d["emulated"], "plan, activation: of the decode engine for one sequence and one token, as TensorRT-RTX's "
             "builder reports them"]
    console.note_list(out, notes + [f"{v['name']}: not built: {v['not_built']}" for v in d["variants"]
                                    if v["not_built"]])


def memory(out: Console, d: dict[str, Any]) -> None:
    """Caches by formula, by measurement, and what engines and processes need."""
    labels = {"latent": "MLA, latent rows", "expanded": "MLA, expanded K/V", "mha": "MHA, same width"}
    rows = []
    for key, label in labels.items():
        each = d[f"{key}_bytes_per_token"]
        totals = [console.size(d[total][key]) for total in ("cache_bytes_per_layer", "cache_bytes")]
        rows.append([label, f"{each} B", *totals, f"{each / d['latent_bytes_per_token']:.1f}x"])
    one = "attention" if "attentions" in d else "layer"
    title = f"Cache of {d['model']}, {d['dtype']}: batch {d['batch']} x {d['context']} tokens, {d['layers']} {one}s"
    console.table(out, title, ["cache", f"per token and {one}", f"one {one}", f"all {one}s", "against latent"], rows)
    if "weights" in d:
        w, each = d["weights"], d["model_bytes_per_token"]["latent"]
        out.print(f"a token takes {each} B of latent cache in all attentions together; weights "
                  f"{console.size(w['bytes'])} ({w['parameters']:,} parameters of the source, --weights {w['mode']}, "
                  f"{console.size(w['written_bytes'])} written)\n", soft_wrap=True)
    _article(out, d["article"])
    if d["eager"]:
        console.table(out, "Measured: what the eager references cache",
                      ["reference", "device", "tokens", "bytes per token", "a decode step's peak"],
                      [[e["subject"], e["device"], e["tokens"], e["bytes_per_token"],
                        console.size(e["step_peak_bytes"]) if "step_peak_bytes" in e else "–"] for e in d["eager"]])
    _engines(out, d["engines"])
    _processes(out, d["ort"])
    if "curve" in d:
        _curve(out, d["curve"])
    console.note_list(out, [*d["not_run"], *(line for line in d.get("curve", {}).get("not_run", ())
                                             if line not in d["not_run"])])


def _article(out: Console, a: dict[str, float]) -> None:
    title = "The article's case (32 layers, 32 heads of 128, d_c 512, 32768 tokens, fp16)"
    with_rope = "latent and its 64 rotary columns, which must be cached too"
    console.table(out, title, ["cache", "GiB", "MHA against it"],
                  [["MHA", f"{a['mha_gib']:.2f}", "1.0x"],
                   ["latent alone, as the article counts", f"{a['latent_gib']:.2f}", f"{a['ratio']:.1f}x"],
                   [with_rope, f"{a['latent_and_rope_gib']:.3f}", f"{a['ratio_with_rope']:.1f}x"]])


def _engines(out: Console, engines: list[dict[str, Any]]) -> None:
    rows = []
    for e in engines:
        limits = ", ".join(f"{name} ≤ {r[2]}" for name, r in e["limits"].items())
        built = ["–" if e[key] is None else console.size(e[key]) for key in ("activation_bytes", "plan_bytes")]
        note = "least" if e["default"] else e.get("note", "")
        rows.append([e["graph"], limits, built[0], console.size(e["predicted_bytes"]), built[1], note])
    if rows:
        console.table(out, "Measured: TensorRT-RTX engines (the builder's figures; predicted: the graph's own tensors "
                      "alive together)", ["graph", "limits", "activation", "predicted", "plan", ""], rows)


def _processes(out: Console, measured: list[dict[str, Any]]) -> None:
    rows = [[r["subject"], ", ".join(f"{name} {v}" for name, v in r["sizes"].items()),
             *[console.size(r[f"{key}_bytes"]) for key in ("io", "activation", "predicted", "loaded")]]
            for r in measured]
    if rows:
        console.table(out, "Measured: ONNX Runtime on the CPU, one step, a process each",
                      ["subject", "sizes", "inputs and outputs", "activation", "predicted", "process after load"], rows)


def _curve(out: Console, d: dict[str, Any]) -> None:
    """A row a point; then what one more token costs."""
    rows = [[r["subject"] + (f" ({r['device']})" if r["device"] not in ("cpu", "-") else ""), r["scope"], r["tokens"],
             r["context"], r["batch"], *(f"{r[f'{key}_bytes'] / 1e6:.1f}" for key in CURVE), r["how"]]
            for r in d["rows"]]
    console.table(out, "Memory over context, MB: what weights and cache add, what a step takes beside them, and the "
                  "peak of all three", ["subject", "of", "new tokens", "context", "batch", *CURVE, ""], rows)
    slopes = [[s["subject"], s["scope"], f"{s['cache_bytes_per_token']:.0f} B"] for s in d["per_token"]]
    if slopes:
        console.table(out, "Measured: cache of one more token", ["subject", "of", "bytes per token"], slopes)


def polygraphy(out: Console, d: dict[str, Any]) -> None:
    """What Polygraphy said here, and where its commands lie."""
    console.table(
        out,
        "polygraphy run against float64 golden outputs",
        ["graph", "runner", "dtype", "cases", "", ""],
        [
            [
                g["graph"],
                g["runner"],
                g["dtype"],
                g["cases"],
                ("pass" if g["pass"] else "FAIL") + ("" if g["counted"] else " (not counted)"),
                g["note"],
            ]
            for g in d["graphs"]
        ],
    )
    if d["converted"]:
        console.table(out, "plans", ["graph, converted for TensorRT-RTX", "plan", ""],
                      [[c["graph"], console.size(c["plan_bytes"] or 0), c.get("note", "")] for c in d["converted"]])
    console.note_list(out, d["not_run"])
    out.print(f"\nInputs, golden outputs, comparator and every command line: {d['folder']}/commands.sh", soft_wrap=True,
              markup=False)


def network(out: Console, d: dict[str, Any]) -> None:
    """Every graph as TensorRT's parser understood it; then why those that failed did, and what was not run."""
    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.1e}"

    rows = []
    for r in d["graphs"]:
        others = f" ({r['other']})" if r["other"] not in ("-", "ort") else ""
        rows.append([r["graph"], r["cache"], r["dtype"], r["layers"], len(r["kinds"] or {}), number(r["rel"]),
                     number(r["other_rel"]) + others, number(r["other_reference_rel"]), f"{r['tolerance']:.2g}",
                     "pass" if r["pass"] else "FAIL"])
    console.table(out, f"The networks that {d['backend']} {d['version']} parsed, run layer by layer; the reference: "
                  f"{d['judge']}", ["graph", "cache", "dtype", "layers", "kinds", "rel to reference",
                                    "rel to ONNX Runtime", "ONNX Runtime to reference", "tolerance", ""], rows)
    console.note_list(out, [*[f"{r['graph']}: {r['note']}" for r in d["graphs"] if r["note"]], *d["not_run"]])
    out.print(f"{len(rows)} graphs: {'[green]pass[/green]' if d['pass'] else '[red]FAIL[/red]'}")


def endpoint(out: Console, d: dict[str, Any]) -> None:
    """One row a prompt, our engine beside the server; the needles by context and depth; remarks and errors."""
    from rich.markup import escape

    rows = []
    for r in d["prompts"]:
        row = [escape(one_line(r["id"])), *_pace(r), f"{r['tokens']} ({r['tokens_counted_by']})" if r["runs"] else "–",
               escape(one_line(r["finish_reason"] or "–", 16))]
        if d["against"]:
            a = r["agreement"]
            row += [*_pace(r["ours"] or {}), "–" if a is None else "equal" if a["equal"] else
                    f"{a['common_prefix']} of {a['served_characters']} and {a['our_characters']} characters"]
        rows.append([*row, "FAILED" if r["failed"] else escape(one_line(r["text"], 48))])
    ours = ["ours: first token, ms", "ours: tokens/s", "common prefix"] if d["against"] else []
    console.table(out, f"{d['model']} at {d['url']}, greedy" + (f", beside {d['against']}" if d["against"] else ""),
                  ["prompt", "first token, ms", "tokens/s", "tokens", "finish", *ours, "answer"], rows)
    for key in ("verdicts", "ours"):
        if any("needle" in r and r["needle"][key] for r in d["prompts"]):
            _needles(out, d, key)
    remarks: dict[str, list[str]] = {}
    for r in d["prompts"]:
        for remark in [*r["remarks"], *([] if r["repeats_equal"] else ["the repeats' texts differ"]), *r["errors"],
                       *([f"our engine: {r['ours_error']}"] if r["ours_error"] else [])]:
            remarks.setdefault(remark, []).append(r["id"])
    console.note_list(out, [f"{'all' if len(ids) == len(rows) > 1 else ', '.join(ids)}: {one_line(remark)}"
                            for remark, ids in remarks.items()])
    console.note_list(out, [d["times"]])
    if d["against"]:
        out.print(f"{d['equal']} of {d['compared']} texts equal")


def one_line(text: str, most: int | None = None) -> str:
    """What a server wrote, fit for a terminal: no line breaks, no control characters, cut to `most` characters."""
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:most])
    return plain + ("…" if most is not None and len(text) > most else "")


def _pace(r: dict[str, Any]) -> list[str]:
    first, rate = r.get("seconds_to_first_token"), r.get("tokens_per_second")
    return ["–" if first is None else f"{1000 * first:.0f}", "–" if rate is None else f"{rate:.1f}"]


def _needles(out: Console, d: dict[str, Any], key: str) -> None:
    """Words of text down, depths across; of repeats how many were exact, where they differ."""
    cells: dict[int, dict[int, str]] = {}
    tokens: dict[int, list[int]] = {}
    for r in d["prompts"]:
        if "needle" in r:
            needle, found = r["needle"], r["needle"][key]
            verdicts = found if isinstance(found, list) else [found]
            cell = "failed" if not found else verdicts[0] if len(set(verdicts)) == 1 else (
                f"{verdicts.count('exact')} of {len(verdicts)} exact")
            cells.setdefault(needle["context"], {})[needle["depth"]] = cell
            counted = (r if key == "verdicts" else r["ours"] or {}).get("prompt_tokens")
            tokens.setdefault(needle["context"], []).extend([] if counted is None else [counted])
    depths = list(next(iter(cells.values())))
    console.table(out, "Needles" + (" at the server" if key == "verdicts" else " in our engine") +
                  ": a number in so many words of text, behind so much of it",
                  ["words", "tokens of prompt at most", *(f"{depth} %" for depth in depths)],
                  [[words, max(tokens[words], default="–"), *(row[depth] for depth in depths)]
                   for words, row in cells.items()])
