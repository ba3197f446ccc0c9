"""What `inspect` says of a source before anything is exported: sizes, scale, cache, parameters, price of folding."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter import console
from exporter.config import MLAConfig
from exporter.decoder_config import DecoderConfig
from exporter.presets import PRESETS
from exporter.rope import longrope_set, softmax_scale
from exporter.source import open_model, open_source
from exporter.weights import folding_price

if TYPE_CHECKING:
    from rich.console import Console

    from exporter.tensor_parallel import Ranks


def inspect(what: str, *, scope: str | None, layer: int | None, allow_pickle: bool) -> dict[str, Any]:
    """Facts of a source as JSON-ready data. Whole where it is a decoder, unless a layer was asked for."""
    path = Path(what)
    decoder = path.is_dir() or path.name == "config.json" or (what in PRESETS and what != "article")
    whole = scope == "model" or (scope is None and layer is None and decoder)
    if whole:
        from exporter.model_export import active_parameters, parameters

        source = open_model(what, weights=False)
        d = source.decoder
        attentions = d.layers * d.attentions_per_layer
        return {"model": source.name, "contract": "model", **_facts(d.attention, attentions), "decoder": d.to_dict(),
                "layers": d.layers, "parameters": parameters(d), "active_parameters": active_parameters(d)}
    one = open_source(what, layer=layer, allow_pickle=allow_pickle)
    return {"model": one.name, "contract": "layer", **_facts(one.config, 1),
            "tensors": {name: list(t.shape) for name, t in one.tensors.items()}}


def _facts(c: MLAConfig, attentions: int) -> dict[str, Any]:
    return {"config": c.to_dict(), "attentions": attentions, "softmax_scale": softmax_scale(c), "row_dim": c.row_dim,
            "longrope": longrope_set(c, c.max_position_embeddings),
            "latent_bytes_per_token": 2 * c.row_dim * attentions,
            "expanded_bytes_per_token": 2 * c.expanded_dim * attentions, "folding_price": folding_price(c)}


def show(out: Console, data: dict[str, Any]) -> None:
    """Print `inspect`'s data."""
    c, latent, expanded = data["config"], data["latent_bytes_per_token"], data["expanded_bytes_per_token"]
    rows = [
        ["hidden size D", c["hidden_size"]], ["heads H", c["num_attention_heads"]],
        ["query rank", c["q_lora_rank"] or "none"], ["latent rank d_c", c["kv_lora_rank"]],
        ["nope / rope / v per head", f"{c['qk_nope_head_dim']} / {c['qk_rope_head_dim']} / {c['v_head_dim']}"],
        ["RoPE", f"{c['rope']['rope_type']}, {c['rope_layout']}, theta {c['rope']['rope_theta']:g}"],
        ["context", c["max_position_embeddings"]], ["softmax scale", f"{data['softmax_scale']:.6f}"],
        ["latent cache per token, 16 bit", f"{latent} bytes ({data['attentions']} x {data['row_dim']} numbers)"],
        ["expanded cache per token, 16 bit", f"{expanded} bytes ({expanded / latent:.1f}x)"],
    ]
    if data["contract"] == "model":
        rows = _decoder_rows(DecoderConfig.from_dict(data["decoder"]), data) + rows
    console.table(out, f"{data['model']} ({c['model_type']})", ["", "value"], rows)
    if "tensors" in data:
        console.table(out, "Attention tensors", ["tensor", "shape"], [[n, str(s)] for n, s in data["tensors"].items()])
    console.note_list(out, [*head_notes(MLAConfig.from_dict(c)),
                            *price_notes(data["folding_price"], None, data["attentions"])])


def _decoder_rows(d: DecoderConfig, data: dict[str, Any]) -> list[list[Any]]:
    two = " (two attentions each)" if d.shortcut else ""
    rows: list[list[Any]] = [["parameters", _count(data["parameters"])], ["layers", f"{d.layers}{two}"],
                             ["vocabulary", f"{d.vocab_size}{', tied head' if d.tie_word_embeddings else ''}"],
                             ["dense FFN", d.intermediate_size]]
    if d.moe is None or not d.sparse_layers:
        return rows
    m = d.moe
    rows[0][1] += f", {'at most ' if m.zero_experts else ''}{_count(data['active_parameters'])} active per token"
    identity = f" + {m.zero_experts} identity" if m.zero_experts else ""
    groups = f", {m.topk_group} of {m.n_group} groups" if m.limited else ""
    return [*rows, ["layers with experts", len(d.sparse_layers)],
            ["experts", f"{m.n_routed_experts}{identity} of {m.moe_intermediate_size}, top "
                        f"{m.num_experts_per_tok}{groups}"],
            ["router", f"{m.scoring}{', choice bias' if m.choice_bias else ''}"
                       f"{', normalised' if m.normalise else ''}, x {m.routed_scaling_factor:g}"],
            ["shared expert", m.shared_intermediate_size or "none"]]


def _count(parameters: int, like: int | None = None) -> str:
    return f"{parameters / 1e9:.2f} B" if (like or parameters) >= 1e9 else f"{parameters / 1e6:.2f} M"


def head_notes(c: MLAConfig) -> list[str]:
    """That the article's heads are a guess, where its shapes give one alone: what proj_kr made for every head looks
    like."""
    if c.model_type != "article" or c.num_attention_heads > 1:
        return []
    return [f"1 head, a guess: proj_qr and proj_kr both give {c.qk_rope_head_dim} rotary columns. If proj_kr was made "
            "rope x heads, it is not MLA's one shared key, and all that follows is wrong: python -m validate doctor "
            "says what each would have to be"]


def price_notes(price: dict[str, int], absorb: str | None, attentions: int) -> list[str]:
    """What folding W_UK and W_UV into their neighbours costs, and what it would add in all."""
    def side(name: str) -> str:
        factored, folded = price[f"{name}_factored"], price[f"{name}_folded"]
        return f"{name} {_count(folded)} against {_count(factored, folded)} parameters ({folded / factored:.1f}x)"

    chosen = f" (this export: {absorb})" if absorb else ""
    added = attentions * sum(price[f"{s}_folded"] - price[f"{s}_factored"] for s in ("query", "output"))
    total = f"; --absorb folded would add {_count(added)} in all" if added > 0 and absorb != "folded" else ""
    return [f"folded against factored absorption, per attention{chosen}: {side('query')}; {side('output')}{total}"]


def weight_notes(data: dict[str, Any]) -> list[str]:
    """Where an export's weights lie, and which form its experts take."""
    w = data["weights"]
    notes = []
    if w["mode"] == "none":
        notes.append(f"no weights (--weights none); they would take {console.size(w['bytes'])}")
    elif w["mode"] == "link" and not w["linked"]:
        notes.append(f"weights {console.size(w['bytes'])}, all written: the checkpoint holds none as {data['dtype']} "
                     "in the layout that the graphs read (export in the checkpoint's own --dtype to link)")
    elif w["linked"]:
        notes.append(f"weights {console.size(w['bytes'])}: {console.size(w['written_bytes'])} written, the rest left "
                     f"in the checkpoint's {len(w['linked'])} file(s)")
    else:
        notes.append(f"weights {console.size(w['bytes'])}")
    if "--fused-decode" in data.get("arguments", ()):
        notes.append("decode.fused has an operator of this project, mla::LatentAttention, and runs where its library "
                     "is: python -m engines operator --build")
    notes += quantised_notes(data)
    if any(record["how"] == "handed" for record in w["linked"].values()):
        notes.append("no hard link to the checkpoint is possible: sessions and builders of this toolkit find its "
                     "files, other tools cannot open the graphs (use --weights copy for them)")
    if data["dtype"] == "bf16" and data["target"] == "ort":
        notes.append("ONNX Runtime's CPU has no bfloat16 products: run this export on a GPU or in the interpreter")
    trained = data["config"]["max_position_embeddings"]
    if data["max_context"] > trained:
        notes.append(f"up to {data['max_context']} rows of past, but the model was made for {trained} positions "
                     "(max_position_embeddings)")
    if data.get("longrope"):
        notes.append(f"longrope: the {data['longrope']} factor set, chosen by --max-context {data['max_context']}")
    return notes + expert_notes(data)


def quantised_notes(data: dict[str, Any]) -> list[str]:
    """How an export's weights were quantised, how much of them, and what was not."""
    q = data["weights"].get("quantised")
    if not q:
        return []
    blocks = sorted({b for b in q["tensors"].values() if b}, reverse=True)
    how = f"blocks of {', '.join(map(str, blocks))}" if blocks else "a scale per output channel"
    sizes = f"{console.size(q['bytes_before'])} became {console.size(q['bytes_after'])}"
    packed = q.get("operator") == "MatMulNBits"
    head = "" if "lm_head.weight" in q["tensors"] else " head,"
    notes = [f"{len(q['tensors'])} matrices are {q['scheme']} ({how}), {q['share']:.0%} of the parameters: {sizes}; "
             f"absorption products, embedding,{head} norms and router stay wide"]
    experts = [n for n in q["wide"] if ".experts." in n]
    if experts:
        reason = "no block size divides their rows"
        notes.append(f"experts stay wide: {'QMoE takes one, and ' if packed else ''}{reason}{' alike' * packed}")
    others = [n for n in q["wide"] if ".experts." not in n]
    if others:
        notes.append(f"{len(others)} matrices stay wide, no block size divides their rows: {', '.join(others[:3])}"
                     + (f" and {len(others) - 3} more" if len(others) > 3 else ""))
    if packed:
        inside = ("activations are rounded to int8 inside" if q["accuracy_level"] == 4 else "products are in float32")
        coded = "MatMulNBits, experts by QMoE" if any(".experts." in n for n in q["tensors"]) else "MatMulNBits"
        notes.append(f"computed by {coded} of ONNX Runtime, accuracy level {q['accuracy_level']}: {inside}")
        if q["scheme"] == "int8" and q["accuracy_level"] == 1:
            notes.append("ONNX Runtime's CPU has no fast kernel for eight bits in float32: it makes every weight wide "
                         "at every step, and its experts round activations all the same; level 1 is for comparing")
    codes = data["source"].get("dequantised_tensors")
    if codes:
        notes.append(f"{codes} tensors of the checkpoint were quantised already: they were dequantised, and what is "
                     f"{q['scheme']} here was quantised anew")
    return notes


def expert_notes(data: dict[str, Any]) -> list[str]:
    """Which form an export's experts take, and what that costs."""
    experts, notes = data.get("experts") or {}, []
    forms = sorted({(name.partition(".")[0], form) for name, form in (experts.get("forms") or {}).items()})
    if forms:
        notes.append("experts: " + ", ".join(f"{kind} {form}" for kind, form in forms))
    if "gather_bytes_per_token" in experts:
        notes.append(f"gathering takes {console.size(experts['gather_bytes_per_token'])} of scratch per token; the "
                     f"dense form is taken from B x T = {experts['dense_from_tokens']} new tokens on")
    return notes



def ranks(made: Ranks) -> dict[str, Any]:
    """The JSON object of a tensor-parallel export."""
    keys = ("model", "source", "target", "dtype", "cache", "cache_dtype", "prefill", "absorb", "max_context")
    graphs = {kind: len(entries) for kind, entries in made.ranks[0].data["tensor_parallel"]["segments"].items()}
    return {"folder": str(made.folder), "contract": "tensor_parallel", **{k: made.data[k] for k in keys},
            "segments": graphs, **made.data["tensor_parallel"]}


def show_ranks(out: Console, made: Ranks) -> None:
    """Bytes of every rank beside the whole model's, and what a token's step sums up."""
    d = ranks(made)
    whole, alike = d["whole_bytes"], sum(d["replicated_bytes"].values())
    out.print(f"[bold]{d['model']}[/bold]  {d['ranks']} ranks, {d['dtype']}, {d['cache']} cache (each rank has it "
              f"all), target {d['target']}, past up to {d['max_context']} rows\n")
    console.table(out, f"Ranks in {made.folder}", ["rank", "heads", "weights", "of the whole", f"above 1/{d['ranks']}",
                                                  "segments"],
                  [[i, m.config.num_attention_heads, console.size(b), f"{b / whole:.4f}",
                    console.size(b - whole / d["ranks"]), ", ".join(f"{n} {kind}" for kind, n in d["segments"].items())]
                   for i, (m, b) in enumerate(zip(made.ranks, d["bytes"], strict=True))])
    share = ", ".join(f"{name} {console.size(size)}" for name, size in d["replicated_bytes"].items())
    runs = made.ranks[0].data["weights"]["mode"] != "none"
    console.note_list(out, [
        f"the whole model is {console.size(whole)}; every rank has {console.size(alike)} of it alike: {share}",
        f"a step sums up {d['all_reduces']} times, {console.size(d['all_reduce_bytes_per_token'])} a token in float32, "
        f"and gathers {console.size(d['gathered_bytes_per_sequence'])} of logits a sequence",
        f"run it: python -m engines parallel {shlex.quote(str(made.folder))} --tokens 1,2,3" if runs else
        "no weights (--weights none): the sizes are what they would be, and nothing here runs; to run it export again "
        "without --weights none"])
