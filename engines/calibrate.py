"""Making the predictor's coefficients: builds of seeded, random shapes, and the fit (`python -m engines.calibrate`).

Graphs are exported without weights and built over a file of holes: the builder's memory does not depend on values.
Every graph is written, linted, built and forgotten. The figures are of the TensorRT-RTX that is installed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx

from engines import lint, trt
from engines.fit import Build, errors, fit
from engines.predict import AROUND, Subject, largest_tensor, release, subject_of
from engines.search import OPT_CONTEXT
from exporter import console
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, build_graph, export, rope_positions
from exporter.formulations import BY_NAME, TABLE
from exporter.graph import infer_and_check
from exporter.manifest import GraphEntry
from exporter.moe_graph import MAX_ELEMENTS
from exporter.presets import preset_config
from exporter.signature import CACHE_FORMS, Range, profile
from exporter.source import seeded_source
from exporter.weight_store import WEIGHT_FILE, store
from exporter.weights import load_attention, plan_rope, plan_weights

BACKEND = "trt-rtx"
LAYERS, MODELS = 600, 60  # layer graphs; exported models, of two to four graphs each
LIMIT = 4e8  # bytes of gathered weights in a sample: larger ones only take longer
Progress = Callable[..., None]
QUANTISED = "quantised"  # in place of a cache form: the append form in 8 bits
_STEPS = {"decode": ("step", "few"), "prefill": ("prefill",)}
KINDS = [(cache, f.name, step) for cache in (*CACHE_FORMS, QUANTISED) for f in TABLE if BACKEND in f.dtypes
         for kind in f.kinds(cache == QUANTISED) if f.prefill_form == "absorbed" or kind == "prefill"
         for step in _STEPS[kind]]


def samples(count: int, seed: int, only: Collection[str] = ()) -> Iterator[Subject]:
    """Attentions of random shapes at random sizes, all forms (or `only` some) in turn, every third in float32."""
    kinds = [kind for kind in KINDS if not only or kind[0] in only or kind[1] in only]
    rng, base = np.random.default_rng(seed), preset_config("deepseek-v2-lite")

    def pick(*options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    for i in range(count):
        cache, form, kind = kinds[i % len(kinds)]
        dtype = ("fp16", "bf16", "fp32")[i // len(kinds) % 3]
        if dtype not in BY_NAME[form].dtypes[BACKEND]:
            dtype = "fp16"
        while True:
            c = replace(base, hidden_size=pick(1024, 2048, 2560, 4096, 5120, 7168), q_lora_rank=pick(None, 768, 1536),
                        num_attention_heads=pick(8, 16, 20, 32, 40, 64, 128), kv_lora_rank=pick(256, 384, 512, 512),
                        qk_nope_head_dim=pick(64, 128, 128, 192), qk_rope_head_dim=pick(32, 64, 64),
                        v_head_dim=pick(64, 128, 128, 192))
            batch = pick(1, 1, 1, 2, 4) if kind == "prefill" else pick(1, 2, 4, 8, 16, 32)
            tokens = {"step": 1, "few": pick(2, 3, 4, 8), "prefill": pick(64, 128, 256, 512, 1024, 2048)}[kind]
            rows = pick(1024, 2048, 4096, 8192, 16384, 32768, 65536)
            s = Subject(c, dtype, "append" if cache == QUANTISED else cache, form, batch, tokens, rows,
                        quantised=cache == QUANTISED)
            if largest_tensor(s)[1] <= MAX_ELEMENTS and 4 * batch * tokens * c.num_attention_heads * s.rows > 2e6:
                break
        yield s


def model_samples(count: int, seed: int) -> Iterator[tuple[dict[str, Any], dict[str, Any], tuple[int, int]]]:
    """Small decoders: config.json, what to ask of the export, and the decode batch and prefill chunk."""
    rng = np.random.default_rng([seed, 1])
    base = json.loads((files("exporter") / "configs" / "deepseek-v2-lite.json").read_text(encoding="utf-8"))

    def pick(*options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    for i in range(count):
        depth, heads = pick(1, 1, 2, 2, 3, 6), pick(8, 16, 32)
        experts = (None, "gather", "dense")[i % 3]
        raw = base | {
            "hidden_size": pick(512, 1024, 2048), "num_attention_heads": heads, "num_key_value_heads": heads,
            "kv_lora_rank": pick(256, 512), "q_lora_rank": pick(None, 512), "num_hidden_layers": depth,
            "intermediate_size": pick(1024, 2048, 4096, 8192), "vocab_size": pick(1024, 8192, 32768),
            "n_routed_experts": pick(8, 8, 16), "num_experts_per_tok": pick(2, 2, 4), "n_shared_experts": pick(1, 2),
            "moe_intermediate_size": pick(256, 512, 1024), "first_k_dense_replace": 0 if experts else depth}
        asked = {"dtype": ("fp16", "bf16", "fp32")[i // 3 % 3], "cache": pick("append", "append", "concat", "scatter"),
                 "prefill": pick("absorbed", "expanded"), "max_context": pick(512, 2048, 8192, 32768),
                 "experts": experts or "auto"}
        yield raw, asked, (pick(1, 2, 4, 8, 16), pick(32, 64, 128, 256, 512))


def measure(path: Path, entry: GraphEntry, s: Subject) -> int | None:
    """The builder's figure for a graph over holes; None where the lint or the builder refuses it."""
    found = {"B": (1, s.batch), "T": (s.tokens, s.tokens), "S": (min(OPT_CONTEXT, s.rows), s.rows)}
    used = {d for t in entry.inputs for d in t.shape if isinstance(d, str)}
    limits = {name: Range(1, opt, most) for name, (opt, most) in found.items() if name in used}
    try:
        if lint.lint(path, {name: r.max for name, r in limits.items()}):
            return None
        return trt.build(BACKEND, path, [profile(entry.inputs, limits)]).activation_bytes
    except CheckError:  # no fused kernel at these sizes
        return None


def _holes(folder: Path) -> None:
    """A weight file of the size that the graphs ask for, with nothing written in it."""
    ends = [0]
    for path in folder.glob("*.onnx"):
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            where = {e.key: e.value for e in tensor.external_data}
            if where:
                ends.append(int(where["offset"]) + int(where["length"]))
    with (folder / WEIGHT_FILE).open("wb") as file:
        file.truncate(max(ends))


def build_layer(s: Subject) -> Build | None:
    """One attention's graph, built."""
    with tempfile.TemporaryDirectory(prefix="mla-calibrate-") as temporary:
        folder = Path(temporary)
        weights = load_attention(seeded_source("sample", s.config, 0), s.rows, dry=True)
        plan = plan_weights(weights, dtype=s.dtype, folded=False, expanded=True)
        plan += plan_rope(weights.inv_freq, weights.rope_factor, rope_positions(s.rows))
        stored, _ = store(folder, plan, "none", lambda name, share=None: None)
        request = ExportRequest("", folder, dtype=s.dtype, cache=s.cache, max_context=s.rows,
                                cache_dtype="fp8" if s.quantised else None)
        entry, model = build_graph(request, weights, s.rows, stored, "decode" if s.tokens <= 8 else "prefill",
                                   BY_NAME[s.formulation], False)
        path = folder / entry.file
        path.write_bytes(infer_and_check(model, folder).SerializeToString())
        _holes(folder)
        found = measure(path, entry, s)
        return None if found is None else Build(s, found)


def build_model(raw: dict[str, Any], asked: dict[str, Any], sizes: tuple[int, int]) -> list[Build]:
    """Every graph of a small decoder, built."""
    with tempfile.TemporaryDirectory(prefix="mla-calibrate-") as temporary:
        source, out = Path(temporary) / "model", Path(temporary) / "out"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(raw))
        made = export(ExportRequest(str(source), out, scope="model", target=BACKEND, weights="none", **asked))
        _holes(out)
        builds = []
        for graph in made.graphs:
            batch, tokens = (sizes[0], 1) if graph.kind == "decode" else (1, sizes[1])
            s = subject_of(made, graph, {"B": batch, "T": tokens, "S": made.max_context})
            gathered = batch * tokens * raw["moe_intermediate_size"] * raw["hidden_size"] * s.itemsize
            if s.experts == "gather" and gathered > LIMIT:
                continue
            found = measure(out / graph.file, graph, s)
            builds += [] if found is None else [Build(s, found)]
        return builds


def training_set(layers: int, models: int, seed: int, only: Collection[str], progress: Progress) -> Iterator[Build]:
    """All builds; minutes."""
    done, total = 0, layers + 8 * models  # a model takes about as long as eight layers
    for s in samples(layers, seed, only):
        progress(f"{s.group}, {done} of {layers} layers", done / total)
        built = build_layer(s)
        if built:
            yield built
        done += 1
    for number, sample in enumerate(model_samples(models, seed)):
        progress(f"model {number + 1} of {models}", done / total)
        yield from build_model(*sample)
        done += 8


def held_out(builds: list[Build], share: float, seed: int) -> tuple[list[Build], list[Build]]:
    """A seeded split into builds to fit and builds to check."""
    order = np.random.default_rng(seed).permutation(len(builds))
    cut = len(builds) - round(share * len(builds))
    return [builds[i] for i in order[:cut]], [builds[i] for i in order[cut:]]


def row(b: Build, predicted: int, error: float) -> list[str]:
    """One line of the error table."""
    s = b.subject
    what = "one attention" if s.decoder is None else f"{len(s.layers)} layers{', ' + s.experts if s.experts else ''}"
    return [s.formulation, s.cache, s.dtype, what, str(s.config.num_attention_heads), str(s.config.kv_lora_rank),
            str(s.batch), str(s.tokens), str(s.rows), console.size(b.measured), console.size(predicted),
            f"{100 * error:+.1f} %"]


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The old coefficients with the new groups in place of their own; InputError where the builders differ."""
    if (old["backend"], old["version"]) != (new["backend"], new["version"]):
        raise InputError(f"--only: the coefficients are of {old['backend']} {old['version']}, {new['version']} is "
                         "installed: fit all of them anew, without --only")
    groups = old["groups"] | new["groups"]
    groups = {name: groups[name] for name in sorted(groups, key=lambda name: (name == AROUND, name))}
    checks = [check for check in old["checks"] if check["of"] != new["checks"][0]["of"]] + new["checks"]
    return old | {"groups": groups, "checks": checks, "builds": sum(group["builds"] for group in groups.values())}


COLUMNS = ["formulation", "cache", "dtype", "graph", "H", "d_c", "B", "T", "S", "measured", "predicted", "off"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--layers", type=int, default=LAYERS, show_default=True, help="Attentions to build.")
@click.option("--models", type=int, default=MODELS, show_default=True, help="Small decoders to build.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the shapes, and of the split.")
@click.option("--check", type=float, default=0.15, show_default=True, help="Share of the builds that a first fit never "
              "sees; its errors on them are printed. The coefficients are then fitted on all.")
@click.option("--only", multiple=True, type=click.Choice([*sorted({form for _, form, _ in KINDS}), QUANTISED]),
              help="Fit this formulation's attentions (or those over quantised caches) anew, no decoders, and keep all "
              "other coefficients; repeatable.")
@click.option("--keep", type=click.Path(path_type=Path), help="Also write every build's figure, one JSON object a "
              "line.")
@click.option("--builds", "known", multiple=True, type=click.Path(path_type=Path), help="Figures that --keep wrote, to "
              "fit together with the new ones; repeatable.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).with_name("coefficients.json"),
              help="Where to write (default: beside this file).")
@console.json_option
def main(as_json: bool, layers: int, models: int, seed: int, check: float, only: tuple[str, ...], keep: Path | None,
         known: tuple[Path, ...], out: Path) -> None:
    """Build the training set with the installed TensorRT-RTX and fit the predictor's coefficients."""
    version = release(str(trt.load(BACKEND).__version__))
    if not 0 <= check < 1:
        raise InputError(f"--check {check}: expected a share, 0 up to 1")
    builds = [Build.from_dict(json.loads(line)) for path in known for line in path.read_text().splitlines()]
    with (keep.open("w", encoding="utf-8") if keep else tempfile.TemporaryFile("w")) as file:
        progress = console.progress(as_json)
        for built in training_set(layers, 0 if only else models, seed, only, progress):
            builds.append(built)
            file.write(json.dumps(built.to_dict()) + "\n")
            file.flush()
    console.end_progress(as_json)
    builds = list({b.subject: b for b in builds}.values())
    train, unseen = held_out(builds, check, seed)
    checked = errors(unseen, fit(train, BACKEND, version))
    data = fit(builds, BACKEND, version)
    within = sum(abs(error) <= 0.15 for _, _, error in checked)
    data["checks"] = [{"of": sorted(only) or "all", "unseen": len(checked), "within_15_percent": within}]
    if only:
        data = merged(json.loads(out.read_text(encoding="utf-8")), data)
    out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    result = {"file": str(out), "version": version, "builds": len(builds), "groups": len(data["groups"]),
              "checks": data["checks"]}

    def show(target: Any) -> None:
        console.table(target, f"Unseen builds: {within} of {len(checked)} within 15 %", COLUMNS,
                      [row(*item) for item in sorted(checked, key=lambda item: -abs(item[2]))])
        console.note_list(target, [f"{len(data['groups'])} groups fitted on {len(builds)} builds: {out}"])

    console.report(as_json, result, show)


if __name__ == "__main__":
    console.main(main, "python -m engines.calibrate")
