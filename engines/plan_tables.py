"""How a plan looks on a terminal: one table a question, the reasons and estimates as notes below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exporter import console

if TYPE_CHECKING:
    from rich.console import Console

TITLES = {"decode": "decode engine alone", "both": "decode and prefill engines", "unified": "one unified engine"}


def show(out: Console, data: dict[str, Any]) -> None:
    """Print a plan."""
    _weights(out, data)
    _cache(out, data)
    _activation(out, data)
    _fits(out, data)
    _crossover(out, data)
    _floors(out, data)
    console.note_list(out, _notes(data))


def _weights(out: Console, data: dict[str, Any]) -> None:
    w = data["weights"]
    rows = [[part, console.size(size), f"{100 * size / w['bytes']:.1f} %"]
            for part, size in sorted(w["parts"].items(), key=lambda item: -item[1])]
    rows += [["each engine, decode or prefill", console.size(w["bytes"]), ""],
             ["weight file; with expanded prefill, kv_b beside W_UK and W_UV",
              f"{console.size(w['bytes'])}; {console.size(w['bytes'] + w['kv_b_bytes'])}", ""]]
    narrow = "" if data["cache_dtype"] == data["dtype"] else f" in {data['cache_dtype']}"
    device = f"{data['gpu']['name']}, " if data["gpu"] else ""
    codes = f", {data['quantise']} projections" if data["quantise"] else ""
    console.table(out, f"{data['model']}, {data['dtype']}{codes}, {data['cache']} cache{narrow}, {device}"
                  f"{data['memory_bytes'] / 1e9:g} GB, backend {data['backend']}: weights", ["part", "bytes", "share"],
                  rows)


def _cache(out: Console, data: dict[str, Any]) -> None:
    c = data["cache_bytes"]
    ratio = f"{c['expanded_per_token'] / c['latent_per_token']:.1f}x"
    console.table(out, f"Cache, all layers; batch {data['batch']} x context {data['context']}",
                  ["form", "per token", "at this size", "ratio"],
                  [["latent rows", console.size(c["latent_per_token"]), console.size(c["latent"]), "1.0x"],
                   ["expanded K and V, as an MHA of this width caches", console.size(c["expanded_per_token"]),
                    console.size(c["expanded"]), ratio]])


def _activation(out: Console, data: dict[str, Any]) -> None:
    rows = []
    for r in data["activation"]:
        parts = sorted(r["parts"].items(), key=lambda item: -item[1])[:3]
        said = r["refused"] or ", ".join(f"{name} {console.size(size)}" for name, size in parts)
        rows.append([f"{r['kind']}.{r['formulation']}", f"B ≤ {r['batch']}, T ≤ {r['tokens']}, S ≤ {r['context']}",
                     "–" if r["bytes"] is None else console.size(r["bytes"]), "leanest" if r["leanest"] else "", said])
    console.table(out, f"Activation per profile ({data['predictor']})", ["graph", "limits", "activation", "", "mostly"],
                  rows)


def _fits(out: Console, data: dict[str, Any]) -> None:
    """The ways to use a GPU side by side: the decode engine alone, with the prefill engine beside it, or one engine."""
    ways = [data["fits"][name] for name in TITLES]
    columns = [f"{title}, {way['gpus'] or 'no number of'} GPU{'' if way['gpus'] == 1 else 's'}"
               for title, way in zip(TITLES.values(), ways, strict=True)]
    shown = [way for way in ways if way["gpus"]]
    rows = []
    for at, what in (("context", "batch"), ("batch", "context")):
        for r in shown[0][f"{what}_at"] if shown else []:
            cells = [next((q[what] for q in way[f"{what}_at"] if q[at] == r[at]), 0) for way in ways]
            rows.append([f"{at} {r[at]}", *(f"{what} {cell}" if cell else "does not fit" for cell in cells)])
    console.table(out, "What fits at most", ["at", *columns], rows)


def _crossover(out: Console, data: dict[str, Any]) -> None:
    rows = [[r["past"], f"{r['tokens']:.0f}"] for r in data["crossover"]["at"]]
    console.table(out, "Which prefill form", ["rows of past", "absorbed below so many new tokens, expanded from there"],
                  [*rows, ["very many", f"{data['crossover']['limit']:.0f}"]])


def _floors(out: Console, data: dict[str, Any]) -> None:
    columns = ["step", "B x T over past", "bytes", "operations", "per byte"]
    rows = []
    for r in data["floors"]:
        row = [f"{r['kind']}, {r['form']}", f"{r['batch']} x {r['tokens']} over {r['past']}", console.size(r["bytes"]),
               f"{r['flops'] / 1e12:.3g} T", f"{r['intensity']:.1f}"]
        if "seconds" in r:
            row += [f"{1e3 * r['seconds']:.3g} ms", r["bound"], f"{r['tokens_per_second']:.0f}"]
        rows.append(row)
    if data["gpu"]:
        columns += ["floor", "set by", "tokens/s"]
    console.table(out, "The least a step must read and compute", columns, rows)
    decode = data["floors"][0]
    console.table(out, "A decode step by part", ["part", "bytes", "operations"],
                  [[p["part"], console.size(p["bytes"]), f"{p['flops'] / 1e9:.3g} G"] for p in decode["parts"]])


def _notes(data: dict[str, Any]) -> list[str]:
    gpu, host = data["gpu"], data["host"]
    notes = [f"reserve {console.size(data['reserve_bytes'])}: driver, context, fragments; --reserve GB sets it"]
    if gpu:
        derived = f"; {gpu['derived']}" if gpu["derived"] else ""
        notes.append(f"{gpu['name']}: {gpu['bandwidth_gbs']:g} GB/s, dense TFLOPS fp16/bf16 {gpu['fp16']:g}, fp8 "
                     f"{gpu['fp8'] or 'none'}, fp32 {gpu['fp32']:g}, compute capability {gpu['capability']} "
                     f"({gpu['source']}{derived})")
    for name, title in TITLES.items():
        fits = data["fits"][name]
        asked = fits["gpus_at_request"]
        slices = f", layers {' '.join(fits['slices'])}" if asked and asked > 1 else ""
        least, here = (f"{n} GPU{'' if n == 1 else 's'}" if n else "no number of GPUs is enough"
                       for n in (fits["gpus_for_weights"], asked))
        notes.append(f"{title}: for the weights {least}; at batch {data['batch']} x context {data['context']} {here}"
                     f"{slices}")
    notes.append(f"on any number of GPUs batch x context is at most {data['most_rows']} rows: a cache tensor holds no "
                 "more than 2^31 - 1 numbers")
    if data["quantise"]:
        head = "" if data["coded_head"] else " head"
        notes.append(f"{data['quantise']}: codes, their scales, and in {data['dtype']} what stays wide, W_UK and W_UV, "
                     f"embedding,{head} and norms; products are computed in {data['dtype']}, and so is the floor's "
                     "arithmetic")
        if data["coded_head"]:
            notes.append("these codes are of ONNX Runtime's MatMulNBits; TensorRT takes fp8 or int4")
    if data["context"] > data["trained_context"]:
        notes.append(f"context {data['context']} is beyond the {data['trained_context']} that the model was made for")
    notes.append(f"building the largest slice's engine: an estimated {console.size(host['memory_bytes'])} of host "
                 f"memory and {_time(host['build_seconds'])} a graph, from the bytes of its weights alone")
    if data["expert_stacks"]:
        count = data["expert_stacks"]
        from_all = f", each choice from all {count} stacks (one tensor holds 2^31 - 1 elements)" if count > 1 else ""
        notes.append(f"experts: gathered below B x T = {data['dense_from_tokens']} new tokens{from_all}; from there on "
                     "dense, which reads every expert")
    if data["expert_stacks"] and data["chunk"] >= data["dense_from_tokens"]:
        notes.append("a unified engine is its prefill graph in decode too: dense, it reads every expert at each step")
    if data["distinct_experts"]:
        notes.append(f"experts at batch {data['batch']}: {data['distinct_experts']:.1f} distinct ones a layer are "
                     "expected where each token chooses at random")
    several = data["fits"]["decode"]["gpus"] or 1
    if several > 1:
        notes.append("over several GPUs a step passes through all in turn: the floor of one step stays, and as many "
                     "batches can be under way as there are GPUs")
    return notes


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
