"""How each section of a report is laid out: what stands open, what opens on a click, which figure in which column."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from validate.report_view import (
    Block,
    Charts,
    Column,
    Facts,
    Fold,
    Notes,
    Reader,
    Table,
    code,
    state,
    word,
)

RED = 8  # red rungs that are spelled out


def blocks(reader: Reader, name: str) -> list[Block]:
    """The blocks of a section, none where it has no data."""
    data = reader.at(f"sections.{name}.data")
    return _LAYOUTS[name](reader, f"sections.{name}.data", data) if data else []


def _columns(*titles: str) -> list[Column]:
    """`rel*`: a column of figures; `cache|MB*`: with its unit."""
    made = []
    for title in titles:
        words, _, unit = title.removesuffix("*").partition("|")
        made.append(Column(words, unit, title.endswith("*")))
    return made


def _configuration(r: Reader, at: str, d: dict[str, Any]) -> list[Block]:
    c, rope = d["config"], d["config"]["rope"]
    of = "one attention" if d["contract"] == "layer" else "a decoder"
    export = [("scope", word(of)), ("compute dtype", code(d["dtype"])), ("cache form", code(d["cache"])),
              ("cached as", code(d["cache_dtype"])), ("written for", code(d["target"])),
              ("prefill", word(d.get("prefill"))), ("absorption", word(d.get("absorb"))),
              ("context at most", r.figure(f"{at}.max_context", "int")),
              ("sequences at most", r.figure(f"{at}.max_batch", "int"))]
    sizes = [("hidden size D", r.figure(f"{at}.config.hidden_size", "int")),
             ("heads H", r.figure(f"{at}.config.num_attention_heads", "int")),
             ("query rank", r.figure(f"{at}.config.q_lora_rank", "int")),
             ("latent d_c", r.figure(f"{at}.config.kv_lora_rank", "int")),
             ("rotary d_r", r.figure(f"{at}.config.qk_rope_head_dim", "int")),
             ("nope per head", r.figure(f"{at}.config.qk_nope_head_dim", "int")),
             ("v per head", r.figure(f"{at}.config.v_head_dim", "int")),
             ("row R = d_c + d_r", r.figure(f"{at}.row_dim", "int")),
             ("softmax scale", r.figure(f"{at}.softmax_scale", "fixed:6")),
             ("RoPE", word(f"{rope['rope_type']}, {c['rope_layout']}, theta {rope['rope_theta']:g}"))]
    weights = [("weights, MB", r.unit(f"{at}.weights.bytes", "MB")), ("kept as", word(d["weights"]["mode"])),
               ("quantised", word(d["weights"]["scheme"] or "no"))]
    if "decoder" in d:
        first, end = d["decoder"]["layers"]
        weights += [("layers", word(f"{first} to {end - 1}")),
                    ("of so many layers", r.figure(f"{at}.decoder.of_layers", "int")),
                    ("attentions", r.figure(f"{at}.attentions", "int")),
                    ("vocabulary", r.figure(f"{at}.decoder.vocab_size", "int")),
                    ("experts", r.figure(f"{at}.decoder.experts", "int")),
                    ("parameters of the source", r.figure(f"{at}.decoder.parameters", "int"))]
    return [Facts("The export", export), Facts("The attention", sizes), Facts("Weights", weights),
            *_notes(d["notes"])]


def _notes(lines: Sequence[str], caption: str = "") -> list[Block]:
    return [Notes(caption, lines)] if lines else []


def _graphs(r: Reader, at: str, d: dict[str, Any]) -> list[Block]:
    rows, folds = [], list[Block]()
    for i, g in enumerate(d["graphs"]):
        path = f"{at}.graphs.{i}"
        rows.append([code(g["name"]), word(g["kind"]), code(g["formulation"]), word("yes" if g["default"] else ""),
                     r.figure(f"{path}.nodes", "int"), r.figure(f"{path}.bytes", "kb:1")])
        tensors = [[word(side[:-1]), code(name), code(shape), code(dtype)] for side in ("inputs", "outputs")
                   for name, shape, dtype in _tensors(g[side])]
        operators = [(o["operator"], r.figure(f"{path}.operators.{j}.count", "int"))
                     for j, o in enumerate(g["operators"])]
        folds.append(Fold(f"{g['name']}: inputs, outputs, operators", [
            Table(f"Inputs and outputs of {g['name']}", _columns("", "tensor", "shape", "dtype"), tensors, wide=True),
            Facts(f"Operators of {g['name']}, nodes each", operators)]))
    return [Table("Graphs of the export", _columns("graph", "kind", "formulation", "default", "nodes*", "file|KB*"),
                  rows), *folds]


def _tensors(tensors: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Name, shape, dtype; the caches of many attentions on one line."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for t in tensors:
        key = (re.sub(r"\.\d+$", ".", t["name"]), f"[{', '.join(map(str, t['shape']))}]", t["dtype"])
        found.setdefault(key, []).append(t["name"])
    return [(names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}", shape, dtype)
            for (_, shape, dtype), names in found.items()]


def _parity(r: Reader, at: str, d: dict[str, Any]) -> list[Block]:
    rows = []
    for i, g in enumerate(d["groups"]):
        path = f"{at}.groups.{i}"
        rows.append([code(g["rung"]), code(g["graph"]) if g["graph"] != "-" else word(""),
                     r.figure(f"{path}.of", "int"), r.figure(f"{path}.rel", "exp"),
                     r.figure(f"{path}.tolerance", "exp"),
                     r.figure(f"{path}.share", "percent" if (g["share"] or 0) < 10 else "times:0",
                              share=1.0 if g["share"] is None else min(1.0, g["share"]),
                              state="pass" if g["pass"] else "fail"), state(g["pass"], g["counted"])])
    more = [key for key in ("max_abs", "mean_abs") if any(x.get(key) is not None for x in d["rungs"])]
    whole = any(x.get("kl") is not None for x in d["rungs"])
    every = [[code(x["name"]), code(x["graph"]),
              r.figure(f"{at}.rungs.{i}.rel", "exp"), r.figure(f"{at}.rungs.{i}.tolerance", "exp"),
              r.figure(f"{at}.rungs.{i}.cosine", "one-minus"),
              *(r.figure(f"{at}.rungs.{i}.{key}", "exp") for key in more),
              *([r.figure(f"{at}.rungs.{i}.top1", "percent"), r.figure(f"{at}.rungs.{i}.kl", "exp")] if whole else []),
              state(x["pass"], x["counted"]), word(x["note"])] for i, x in enumerate(d["rungs"])]
    red = [x["name"] + (f" of {x['graph']}" if x["graph"] != "-" else "")
           + f": {'; '.join(filter(None, (x['note'], x.get('where')))) or 'too far off'}"
           for x in d["rungs"] if x["counted"] and not x["pass"]]
    if len(red) > RED:
        red = [*red[:RED], f"and {len(red) - RED} more, among all rungs below"]
    words = {"max_abs": "max error*", "mean_abs": "mean error*"}
    return [*_notes(red, "Red rungs"),
            Table("Of each runtime and graph the rung that came closest to failing; rel = max |a − b| / std(reference)",
                  _columns("rung", "graph", "rungs*", "rel*", "tolerance*", "of tolerance*", "verdict"), rows),
            *_notes(["not counted: ONNX Runtime’s CPU computes 16-bit products in float32, so it cannot judge them"]
                    if d["not_counted"] else []),
            Fold(f"All {len(d['rungs'])} rungs", [Table("Every rung", _columns(
                "rung", "graph", "rel*", "tolerance*", "1 − cosine*", *(words[k] for k in more),
                *(["top-1*", "KL|nats*"] if whole else []), "verdict", "note"), every, wide=True)])]


def _absorption(r: Reader, at: str, d: dict[str, Any]) -> list[Block]:
    rows = [[code(g["graph"]), word(g["judged"]), r.figure(f"{at}.graphs.{i}.attentions", "int"),
             r.figure(f"{at}.graphs.{i}.costs.cache_bytes_per_token", "fixed:0"),
             r.figure(f"{at}.graphs.{i}.costs.absorbed_cache_bytes_per_token", "fixed:0"),
             r.figure(f"{at}.graphs.{i}.costs.flops_per_step", "mb:1"), state(g["pass"])]
            for i, g in enumerate(d["graphs"])]
    context = d["graphs"][0]["costs"]["context"] if d["graphs"] else 0
    found = [[code(f["graph"]), code(f["code"]), word(f["text"]), code(f["nodes"][0]) if f["nodes"] else word("")]
             for f in d["findings"]]
    notes = [f"{g['graph']}: {note}" for g in d["graphs"] for note in g["notes"]]
    where = [[code(g["graph"]), code(g["absorbed_at"].get("W_UK", "–")), code(g["absorbed_at"].get("W_UV", "–"))]
             for g in d["graphs"]]
    return [*([Table("What stands in the way", _columns("graph", "code", "finding", "node"), found)] if found else []),
            Table(f"The audit; flops of one new token over {context:,} cached rows",
                  _columns("graph", "held against", "attentions*", "cache per token|B*", "absorbed|B*", "flops|10⁶*",
                           "verdict"), rows), *_notes(notes),
            Fold("Where W_UK and W_UV stand", [Table("Products with the absorbed weights, first attention", _columns(
                "graph", "W_UK at", "W_UV at"), where, wide=True)])]


def _doctor(r: Reader, at: str, d: dict[str, Any]) -> list[Block]:
    made: list[Block] = []
    for f in d["findings"]:
        told = [(key, word(f[key])) for key in ("symptom", "where", "evidence", "cause", "cure") if f[key]]
        made.append(Facts(f"{f['name']} ({f['severity']})", told, long=True))
    missing = [f"{n['name']}: {n['why']}" for n in d["not_examined"]]
    return [*made, *_notes([] if made else ["nothing found"]),
            *([Fold(f"Examined ({len(d['examined'])})", _notes(d["examined"]))] if d["examined"] else []),
            *([Fold(f"Not examined ({len(missing)})", _notes(missing))] if missing else [])]


_KINDS = {"latent": "MLA, latent rows", "expanded": "MLA, expanded K and V", "mha": "MHA, same width"}


def _memory(r: Reader, at: str, d: dict[str, Any]) -> list[Block]:
    one = "attention" if "attentions" in d else "layer"
    total = r.megabytes([f"{at}.cache_bytes.{k}" for k in _KINDS])
    caches = [[word(label), r.figure(f"{at}.{key}_bytes_per_token", "int"),
               r.megabytes([f"{at}.cache_bytes_per_layer.{k}" for k in _KINDS])[i], total[i]]
              for i, (key, label) in enumerate(_KINDS.items())]
    made: list[Block] = [Table(
        f"Cache by formula: batch {d['batch']} × {d['context']:,} tokens, {d['layers']} {one}s, {d['dtype']}",
        _columns("cache", f"per token and {one}|B*", f"one {one}|MB*", f"all {one}s|MB*"), caches)]
    if d["ort"]:
        keys = ("io_bytes", "activation_bytes", "predicted_bytes", "loaded_bytes")
        sizes = [r.megabytes([f"{at}.ort.{i}.{key}" for i in range(len(d["ort"]))]) for key in keys]
        made.append(Table("Measured: ONNX Runtime on the CPU, one step, a process each", _columns(
            "subject", "sizes", "inputs and outputs|MB*", "activation|MB*", "predicted|MB*", "process after load|MB*"),
            [[word(x["subject"]), word(", ".join(f"{n} {v:,}" for n, v in x["sizes"].items())),
              *(column[i] for column in sizes)] for i, x in enumerate(d["ort"])]))
    if d["engines"] and one == "layer":
        sizes = [r.megabytes([f"{at}.engines.{i}.{key}" for i in range(len(d["engines"]))])
                 for key in ("activation_bytes", "predicted_bytes", "plan_bytes")]
        made.append(Table("Built now: TensorRT-RTX, by its builder; beside an expanding MLA and an MHA", _columns(
            "graph", "limits", "activation|MB*", "predicted|MB*", "plan|MB*", ""),
            [[code(e["graph"]), word(_limits(e["limits"])), *(column[i] for column in sizes),
              word("least" if e["default"] else e.get("note", ""))] for i, e in enumerate(d["engines"])]))
    if d["eager"]:
        made.append(Fold("What the eager references cache", [Table("Measured: eager references", _columns(
            "reference", "device", "tokens*", "per token|B*"),
            [[word(e["subject"]), word(e["device"]), r.figure(f"{at}.eager.{i}.tokens", "int"),
              r.figure(f"{at}.eager.{i}.bytes_per_token", "int")] for i, e in enumerate(d["eager"])], wide=True)]))
    return made


def _limits(limits: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} ≤ {r[2]:,}" for name, r in limits.items())


def _curve(r: Reader, at: str, d: dict[str, Any]) -> list[Block]:
    from validate.memory_charts import panels
    from validate.plot import svg

    pictures = [svg(p.title, [p], prefix=f"curve-{i}", alone=False) for i, p in enumerate(panels(d))]
    slopes = [[word(s["subject"]), word(s["scope"]), r.figure(f"{at}.per_token.{i}.cache_bytes_per_token", "fixed:0")]
              for i, s in enumerate(d["per_token"])]
    columns = [r.megabytes([f"{at}.rows.{i}.{key}_bytes" for i in range(len(d["rows"]))])
               for key in ("weights", "cache", "step", "peak")]
    rows = [[word(x["subject"]), word(x["scope"]), *(r.figure(f"{at}.rows.{i}.{k}", "int") for k in (
        "tokens", "context", "batch")), *(column[i] for column in columns), word(x["how"])]
            for i, x in enumerate(d["rows"])]
    made: list[Block] = []
    if pictures:
        made.append(Charts(f"Batch {d['batch']}; a prefill takes {d['chunk']:,} new tokens at most. Solid: measured, "
                           "each point in a process of its own. Dashed: predicted, or a formula. Both axes are "
                           "logarithmic.", pictures))
    if slopes:
        made.append(Table("Measured: what one more token adds to a cache", _columns(
            "subject", "of", "cache per token|B*"), slopes))
    return [*made, Fold(f"All {len(rows)} points", [Table(
        "Memory over context: what weights and cache add, a step’s scratch, and the peak of all three", _columns(
            "subject", "of", "new tokens*", "context*", "batch*", "weights|MB*", "cache|MB*", "scratch|MB*",
            "peak|MB*", "how"), rows, wide=True)])]


def _engines(r: Reader, at: str, d: dict[str, Any]) -> list[Block]:
    made = _notes([f"{name}: {problem}" for name, problem in d.get("problems", {}).items()], "Damaged or stale")
    for b, told in enumerate(d["backends"]):
        path = f"{at}.backends.{b}.engines"
        columns = [r.megabytes([f"{path}.{i}.{key}" for i in range(len(told["engines"]))])
                   for key in ("activation_bytes", "predicted_bytes", "weight_bytes", "plan_bytes")]
        rows = [[code(e["engine"]), word(_limits(e["limits"])), columns[0][i], columns[1][i],
                 r.figure(f"{path}.{i}.of_predicted", "percent"), columns[2][i], columns[3][i],
                 word("yes" if e["file"] else "")] for i, e in enumerate(told["engines"])]
        libraries = ", ".join(f"{k} {v}" for k, v in told["libraries"].items() if k != "python")
        made.append(Table(f"{told['backend']} ({libraries}): the builder’s figures beside the prediction", _columns(
            "engine", "limits", "activation|MB*", "predicted|MB*", "of predicted*", "weights|MB*", "plan|MB*", "kept"),
            rows))
        notes = [told["stale"] or "", f"layout {told['layout']['kept']}: {told['layout']['why']}",
                 f"step time: {told['timing']}", *(f"{e['engine']}: {e['explained']}" for e in told["engines"]
                                                   if e["explained"]), *told["refused"].values(), *told["notes"]]
        made += _notes([n for n in notes if n])
        commands = [e["command"] for e in told["engines"] if e["command"]]
        if commands:
            made.append(Fold("The same by hand", [Notes("", commands, code=True)]))
    return made


def _versions(r: Reader, at: str, d: dict[str, Any]) -> list[Block]:
    return [Notes("Commands, from the folder that this page was made in", d["commands"], code=True),
            Facts("Libraries", [(name, word(version)) for name, version in d["libraries"].items()]),
            Facts("Machine", [(name, word(value)) for name, value in d["platform"].items()])]


_LAYOUTS: dict[str, Callable[[Reader, str, dict[str, Any]], list[Block]]] = {
    "configuration": _configuration, "graphs": _graphs, "parity": _parity, "absorption": _absorption,
    "doctor": _doctor, "memory": _memory, "curve": _curve, "engines": _engines, "versions": _versions}
