"""TABLE of ailments: what can be wrong with an MLA artefact, how it shows, why, and what cures it. One row each.

A finding is an ailment with the evidence that was measured. `fault` fails the examination; `remark` is advice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ailment:
    """`seen_in`: what shows it, of export, checkpoint, graph, training; `article`: its number among the article's
    faults."""

    name: str
    symptom: str
    cause: str
    cure: str
    seen_in: tuple[str, ...]
    severity: str = "fault"
    article: int | None = None

    def found(self, evidence: str, *, where: str = "", severity: str | None = None, cause: str | None = None,
              cure: str | None = None) -> Finding:
        """The finding; `where` names the graph, tensor or layer; `severity`, `cause` and `cure` replace the row's
        own, where more is known."""
        return Finding(self.name, self.symptom, evidence, cause or self.cause, cure or self.cure,
                       severity or self.severity, where)


@dataclass(frozen=True)
class Finding:
    """One ailment found: `evidence` are measured numbers with the names of nodes or tensors, a line for each thing."""

    name: str
    symptom: str
    evidence: str
    cause: str
    cure: str
    severity: str
    where: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


@dataclass
class Report:
    """What was found, what was examined, and what could not be and why."""

    what: str
    kind: str
    findings: list[Finding] = field(default_factory=list)
    examined: list[str] = field(default_factory=list)
    not_examined: list[tuple[str, str]] = field(default_factory=list)
    training: dict[str, Any] | None = None

    @property
    def passed(self) -> bool:
        """No fault was found (remarks do not fail)."""
        return all(f.severity != "fault" for f in self.findings)

    def add(self, findings: Iterable[Finding]) -> None:
        """Findings that are not there yet."""
        self.findings += [f for f in findings if f not in self.findings]

    def skip(self, name: str, why: str) -> None:
        """Something that could not be examined, once."""
        if (name, why) not in self.not_examined:
            self.not_examined.append((name, why))

    def see(self, what: str) -> None:
        """Something that was examined, once."""
        if what not in self.examined:
            self.examined.append(what)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        data: dict[str, Any] = {
            "pass": self.passed, "what": self.what, "kind": self.kind,
            "findings": [f.to_dict() for f in self.findings], "examined": self.examined,
            "not_examined": [{"name": n, "why": w} for n, w in self.not_examined]}
        return data | ({"training": self.training} if self.training is not None else {})


_ALL, _RUN, _FILES, _EXPORT = ("export", "graph"), ("export", "graph"), ("checkpoint",), ("export",)
_DRIFT = "right at the first token, worse with every further one; benchmarks fall"
_PLAIN_WRONG = "outputs are wrong from the first token on"

AILMENTS = {a.name: a for a in (
    # ---- shapes and files of a source
    Ailment("shape-mismatch", "shapes cannot be multiplied, or a reshape fails, in the first forward pass",
            "a projection has another width than the configuration (or the other projections) says",
            "proj_qr gives rope x heads, proj_kr rope, q and k nope + rope each, kv_a d_c + d_r, kv_b heads x (nope + "
            "v)",
            _FILES, article=1),
    Ailment("odd-rope-dim", "a reshape error at run time, far from its cause",
            "RoPE rotates pairs of columns, and the rotary width is odd", "choose an even qk_rope_head_dim", _FILES,
            article=1),
    Ailment("tensor-missing", "a layer cannot be loaded, or is filled with random numbers",
            "the weights do not hold what the configuration asks for", "fetch the checkpoint again, with all shards",
            _FILES),
    Ailment("tensor-unknown", "outputs differ from the original's though everything loads",
            "the weights hold more than this architecture uses", "see whether it is another architecture", _FILES),
    Ailment("latent-norm-missing", "the latent norms cannot be loaded", "a conversion without latent norms (TransMLA) "
            "whose configuration does not say so", "state qk_latent_layernorm: false in config.json", _FILES),
    Ailment("latent-norm-unused", _PLAIN_WRONG, "the weights hold latent norms and config.json says there are none",
            "take qk_latent_layernorm: false out of config.json", _FILES),
    Ailment("head-dim-mismatch", "shapes or the softmax scale follow the wrong width",
            "config.json states a head width that is not nope + rope", "correct the field, or remove it", _FILES),
    Ailment("rope-type-missing", _DRIFT, "the scaling of RoPE states YaRN's fields and no rope_type, so readers take "
            "plain RoPE", "state rope_type: yarn", _FILES),
    Ailment("depth-mismatch", "layers are ignored, or cannot be found", "num_hidden_layers and the weights disagree",
            "use the checkpoint's own config.json", _FILES),
    Ailment("fp8-scale-missing", "weights of magnitude 100 and more; outputs are noise",
            "FP8 codes without their weight_scale_inv", "fetch the shard that holds the scale", _FILES),
    Ailment("fp8-block", "accuracy falls by some points (90 against 95.5)",
            "FP8 codes were made in blocks of another size than they are read with",
            "read them with the block that they were made with (weight_block_size)", _FILES),
    Ailment("fp8-scale-inverted", "weights of absurd size; outputs are noise",
            "the scales are to be divided by where weight_scale_inv multiplies, in spite of its name",
            "store the reciprocals", _FILES),
    Ailment("not-finite", "NaN everywhere", "weights that are NaN or infinite", "fetch the checkpoint again", _FILES),
    # ---- what a graph caches and attends (validate/absorption_checks.py)
    Ailment("cache-per-head", "memory did not fall", "keys and values of every head are cached in place of the latent",
            "cache c_kv and one rotary key", _ALL, article=2),
    Ailment("cached-expansion", "memory did not fall", "keys or values are cached beside the latent they are made from",
            "cache c_kv and one rotary key alone", _ALL, article=2),
    Ailment("cache-width", "memory did not fall as it should", "a cache row holds not d_c + d_r numbers",
            "cache c_kv and one rotary key alone", _ALL, article=2),
    Ailment("rope-on-latent", "position is lost or mixed into content; long prompts fail",
            "RoPE is applied to the latent c_kv", "rotate only the d_r columns that are projected from the hidden "
            "state", _ALL, article=3),
    Ailment("rope-from-latent", "position is lost or mixed into content",
            "the rotary key is projected from the latent", "project it from the hidden state", _ALL, article=3),
    Ailment("rope-unseen", "order of words does not matter", "no cached column is rotated",
            "rotate the d_r columns before they are cached", _ALL, article=3),
    Ailment("expanded-each-step", "decoding is no faster than without MLA, or slower",
            "K or V are rebuilt from the cache at every step: absorption is not in effect",
            "W_UK into the query's side, W_UV into the output's", _ALL, article=4),
    Ailment("rows-per-head", "a step needs a multiple of its memory", "cached rows are repeated for every head",
            "broadcast in the product", _ALL, article=4),
    Ailment("wide-scores", "a step needs a multiple of its memory", "scores are products by element, summed later",
            "one matrix product", _ALL, article=4),
    Ailment("absorption-unseen", "decoding is no faster than without MLA",
            "no product with W_UK before, or with W_UV behind, the attention over latent rows",
            "W_UK into the query's side, W_UV into the output's", _ALL, article=4),
    Ailment("norm-on-read", "a step normalises the whole past again", "the latent is cached before its norm",
            "norm, then cache", _ALL),
    Ailment("cache-not-written", "the second step forgets the first", "new rows do not leave the graph",
            "return the new rows, or the cache they were written into", _ALL),
    Ailment("latent-not-scored", "not MLA", "values are made of columns that no query meets",
            "see whether it is another attention", _ALL),
    Ailment("no-attention", "the past has no influence", "cached rows are not attended", "attend them", _ALL),
    Ailment("cannot-see-through", "the examination is not complete", "an operator that cached rows cannot be followed "
            "through", "write the attention in ONNX's own operators", _ALL),
    Ailment("attention-in-if", "a TensorRT build fails", "the attention stands in a branch (If) or a loop",
            "one graph for prefill and one for decode", _ALL),
    Ailment("path-outside", "a runtime refuses the graph, or reads another file",
            "external data named by an absolute path or through ..", "keep weights at or below the graph", _ALL),
    # ---- an export that equals its source with a known mistake made (validate/doctor_hypotheses.py)
    Ailment("mscale-dropped", _DRIFT, "YaRN's mscale^2 is missing from the softmax scale",
            "(nope + rope)^-1/2 x mscale(factor, mscale_all_dim)^2", _RUN),
    Ailment("mscale-once", _DRIFT, "mscale is in the softmax scale once, not squared", "square it: queries and keys "
            "both carry it", _RUN),
    Ailment("mscale-field", _DRIFT, "the softmax scale takes mscale in place of mscale_all_dim",
            "mscale_all_dim belongs to the scale, mscale / mscale_all_dim to cos and sin", _RUN),
    Ailment("mscale-uncalled-for", _DRIFT, "an mscale^2 where no mscale_all_dim is stated",
            "without mscale_all_dim YaRN scales cos and sin, and leaves the softmax alone", _RUN),
    Ailment("scale-from-rank", _DRIFT, "the softmax scale is of the latent row: (rank + rope)^-1/2, or rank^-1/2",
            "absorption changes the width of the product, not the attention: (nope + rope)^-1/2", _RUN),
    Ailment("scale-from-nope", _DRIFT, "the softmax scale leaves out the rotary columns", "(nope + rope)^-1/2", _RUN),
    Ailment("scale-from-keys", _DRIFT, "the softmax scale is of the keys' real width; the article's layer divides by "
            "(d_model / heads + rope)^1/2", "keep the scale that the weights were trained with", _RUN),
    Ailment("scale-missing", "attention is all on one row", "there is no softmax scale", "(nope + rope)^-1/2", _RUN),
    Ailment("scale-twice", "attention is nearly even over all rows", "the softmax scale is applied twice",
            "either in the weights or in the graph", _RUN),
    Ailment("scale-wrong", _DRIFT, "the softmax scale is none of the known formulas",
            "(nope + rope)^-1/2, times mscale^2 where mscale_all_dim is stated", ("graph",)),
    Ailment("rope-layout", "exact at position 0, wrong after it", "RoPE turns halves where the weights were trained "
            "with interleaved pairs, or the reverse", "see rope_interleave, and the family's layout", _RUN),
    Ailment("key-only-deinterleaved", "exact at position 0, wrong after it",
            "only one of query and key was brought into the layout that is rotated", "both, or neither", _RUN),
    Ailment("rope-unstretched", "right near position 0, wrong further on",
            "the frequencies are not those of YaRN or longrope", "read rope_scaling (rope_parameters), type and factor",
            _RUN),
    Ailment("rope-theta", "right near position 0, wrong further on", "RoPE's base is 10000, not the stated rope_theta",
            "read rope_theta", _RUN),
    Ailment("rope-frequencies", "right near position 0, wrong further on",
            "the frequencies are those of no known mistake", "compare with the configuration's RoPE", ("graph",)),
    Ailment("rope-factor-twice", _DRIFT, "YaRN's factor is on cos and sin and in the softmax scale",
            "one or the other: cos and sin carry mscale / mscale_all_dim", _RUN),
    Ailment("rope-factor-dropped", _DRIFT, "cos and sin lack their factor", "multiply both by it", _RUN),
    Ailment("long-factors-unused", "right up to the original context, wrong beyond (or the reverse)",
            "longrope's other set of factors is in use", "long factors where the context exceeds the original one",
            _RUN),
    Ailment("kv-b-order", _PLAIN_WRONG, "kv_b_proj was read as all K then all V", "view(heads, nope + v, d_c)",
            _EXPORT),
    Ailment("norm-gain-dropped", "fine with fresh weights, wrong with trained ones", "a latent norm's gain is left out",
            "multiply by kv_a_layernorm (q_a_layernorm)", _EXPORT),
    Ailment("raw-latent-cached", _PLAIN_WRONG, "the latent norm is skipped", "norm, then cache", _EXPORT),
    Ailment("query-norm-skipped", _PLAIN_WRONG, "the query latent's norm is skipped", "norm between q_a and q_b",
            _EXPORT),
    Ailment("latent-eps", "small differences where latents are small", "the latent norm takes rms_norm_eps, and has an "
            "epsilon of its own", "1e-6 in every family but the few that say otherwise", _RUN),
    Ailment("latent-scale-dropped", _PLAIN_WRONG, "the latent lacks its factor (hidden / kv_rank)^1/2 (LongCat)",
            "scale before caching", _EXPORT),
    Ailment("query-scale-dropped", _DRIFT, "the query latent lacks its factor (hidden / q_rank)^1/2 (LongCat)",
            "scale after the norm", _EXPORT),
    Ailment("query-temperature-dropped", "right up to the original context, wrong beyond", "queries do not grow with "
            "their position (Mistral 4)", "1 + beta ln(1 + floor(position / original))", _EXPORT),
    Ailment("up-v-bias-lost", "outputs are off by a constant vector", "the values' bias is lost",
            "W_O b_v belongs into the output's bias", _EXPORT),
    Ailment("up-v-bias-twice", "outputs are off by a constant vector", "the values' bias is added twice", "once",
            _EXPORT),
    Ailment("up-k-bias-lost", "no output shows it", "the keys' bias is not in the file; the softmax drops it anyway",
            "keep it, or know that it is gone", _EXPORT),
    Ailment("projection-bias-lost", _PLAIN_WRONG, "a projection's bias is lost (attention_bias: on q_a, kv_a and o)",
            "carry it", _EXPORT),
    Ailment("routed-scale-dropped", _PLAIN_WRONG, "experts lack routed_scaling_factor", "multiply their sum by it",
            _EXPORT),
    Ailment("choice-bias-as-weight", _PLAIN_WRONG, "the bias that only chooses experts also weighs them",
            "weigh by the scores without it", _EXPORT),
    Ailment("choice-bias-dropped", _PLAIN_WRONG, "experts are chosen without e_score_correction_bias",
            "add it before the choice", _EXPORT),
    Ailment("groups-ignored", _PLAIN_WRONG, "experts are chosen among all groups", "limit to the best groups first",
            _EXPORT),
    Ailment("residual-scale-dropped", _PLAIN_WRONG, "branches lack their factor (scale_depth)", "multiply by it",
            _EXPORT),
    Ailment("embedding-scale-dropped", _PLAIN_WRONG, "the embedding lacks its factor (scale_emb)", "multiply by it",
            _EXPORT),
    Ailment("logits-scale-dropped", "sampling is too cold or too hot; greedy answers are right",
            "the hidden state before the head lacks its factor (dim_model_base)", "multiply by it", _EXPORT),
    Ailment("last-token-off-by-one", "answers repeat the prompt's last token", "logits are those of the token before",
            "last_token is an index from 0", _EXPORT),
    Ailment("weights-differ", "outputs may be right all the same", "the weight file is not made of the source",
            "export again", _EXPORT),
    Ailment("unexplained-difference", _PLAIN_WRONG, "none of the known mistakes reproduces it",
            "python -m validate parity says which rung is the first to differ", _EXPORT),
    # ---- what a graph does when it runs
    Ailment("float32-angles", "long contexts are off by more than rounding", "angles were computed in float32: "
            "position x frequency loses bits (7e-5 at 1000, 2e-3 at 32k)", "compute angles in float64, round cos and "
            "sin", _RUN),
    Ailment("rope-table-short", "failure or nonsense near the end of the declared context",
            "the rotary tables end before the context does", "as many positions as the context and the new tokens",
            _RUN),
    Ailment("stale-rows", "answers depend on who used the cache before; intermittent NaN",
            "rows beyond past_lengths influence the result", "mask after the product (Where), not by adding", _RUN),
    Ailment("scatter-one-too-many", "answers of another sequence change, now and then", "a step writes cache rows that "
            "are not those of its new tokens", "write exactly the rows past_lengths to past_lengths + T - 1", _RUN),
    Ailment("empty-row-nan", "intermittent NaN in batches with an empty or padded sequence",
            "a row of the softmax has nothing to attend: 0 / 0", "let each token see itself, or a finite mask value",
            _RUN),
    Ailment("ragged-differs", "wrong only for batches of more than one", "a sequence in a ragged batch does not give "
            "what it gives alone", "mask by each sequence's own length", _RUN),
    Ailment("chunk-differs", "wrong only with chunked prefill", "a prefill in chunks does not give what it gives whole",
            "positions and mask count from past_lengths", _RUN),
    Ailment("unscaled-scores", "overflow to NaN, or perplexity 27.6 against 7.9, in 16 bits",
            "float16 scores are scaled after the product", "scale queries (or W_UK) before it", _RUN),
    # ---- training
    Ailment("query-not-compressed", "training runs out of memory", "the query has no low rank",
            "give it one (q_lora_rank) for training; at inference it may be merged where no norm stands between",
            ("training",), severity="remark", article=5),
)}
