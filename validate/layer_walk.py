"""The walk of a layer search: the float64 reference goes through the model, and the cut graphs beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch

from engines.measure import give_back
from exporter.decoder_config import DecoderConfig, MoEConfig
from exporter.dtypes import DTYPES
from exporter.errors import CheckError, InputError
from exporter.manifest import Export, GraphEntry
from validate.graph_parts import GraphParts
from validate.ladder import Progress
from validate.layer_search import Part, Search
from validate.metrics import EXACT, Difference, Tolerance, compare, worst_of
from validate.model_traces import TORCH_DTYPES, turning_gap
from validate.part_session import PartSession, Run
from validate.quantised_weights import DecodedTensors, scheme_of, tolerance_of
from validate.references import DecoderReference, Prompt
from validate.references.decoder import Routing
from validate.references.decoder_tensors import open_decoder_tensors
from validate.traces import far_position

TOKENS, FAR_TOKENS = 24, 4
NEW = {"decode": 4, "prefill": 16}  # tokens of a step, behind those before them as past
FAR_BYTES = 256 << 20  # keys and values of a far past, which the reference expands; more is left out, and said


class _Past(Sequence[torch.Tensor]):
    """Rows [P, R] that a long past might have left in each attention, drawn when they are asked for."""

    def __init__(self, made: Export, length: int, seed: int) -> None:
        self._made, self.length, self._seed = made, length, seed

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        assert isinstance(index, int)
        c, rng = self._made.config, np.random.default_rng([self._seed, 17, index])
        gain = np.concatenate([rng.uniform(0.5, 1.5, c.kv_lora_rank), np.full(c.qk_rope_head_dim, 2.0)])
        rows = rng.standard_normal((self.length, c.row_dim)) * gain
        return torch.from_numpy(rows.astype(DTYPES[self._made.dtype].numpy).astype(np.float64))

    def __len__(self) -> int:
        return self._made.attentions


class _Reference(DecoderReference):
    """The reference, and what its router said last."""

    routing: Routing | None = None

    def _route(self, layer: int, moe: MoEConfig, x: torch.Tensor, router: str, routings: list[Routing]
               ) -> tuple[torch.Tensor, torch.Tensor]:
        found = super()._route(layer, moe, x, router, routings)
        self.routing = routings.pop()  # one layer's scores at a time
        return found

    def routed(self, layer: int, moe: MoEConfig, hidden: torch.Tensor) -> Routing:
        """What a layer's router says of the stream before it."""
        prefix, half = f"model.layers.{layer}.", ".0" if self.config.shortcut else ""
        normed = self._norm(hidden.to(self.dtype), f"{prefix}post_attention_layernorm{half}.weight")
        self._route(layer, moe, normed, f"{prefix}mlp.{'router.classifier' if self.config.shortcut else 'gate'}", [])
        assert self.routing is not None
        return self.routing


def walk(made: Export, decoder: DecoderConfig, graphs: Sequence[GraphEntry], found: Search, *, seed: int,
         layers: range | None, progress: Progress) -> None:
    """Judge every part of the graphs into `found`."""
    exported = range(*made.data["layers"])
    layers = layers or exported
    if layers.start != exported.start or not layers or layers.stop > exported.stop:
        raise InputError(f"layers {layers}: expected the export's first ones, of {exported}")
    _Walk(made, decoder, [GraphParts(made, g) for g in graphs], found, seed, layers, progress).run()


class _Walk:
    """One pass of the reference, and of the graphs beside it."""

    def __init__(self, made: Export, decoder: DecoderConfig, graphs: list[GraphParts], found: Search, seed: int,
                 layers: range, progress: Progress) -> None:
        self.made, self.decoder, self.graphs, self.found = made, decoder, graphs, found
        self.layers, self.seed, self.progress, self.tolerance = layers, seed, progress, tolerance_of(made)
        source = open_decoder_tensors(made.data["source"], decoder)
        tensors = DecodedTensors(made, source) if scheme_of(made) else source
        options: dict[str, Any] = {"max_context": made.max_context, "layers": layers}
        self.reference = _Reference(decoder, tensors, **options)
        self.narrow = _Reference(decoder, tensors, dtype=TORCH_DTYPES[made.dtype], **options)
        self.prompts = self._prompts()
        self.walls = [_walls(g, decoder, range(*made.data["layers"])) for g in graphs]
        self.rows = torch.empty(0)  # of the attention that ended last
        self.stream: dict[str, torch.Tensor] = {}  # what the layer's parts start from, by place; "" is the present one

    def _prompts(self) -> list[Prompt]:
        rng, made = np.random.default_rng([self.seed, 13]), self.made

        def draw(tokens: int) -> torch.Tensor:
            if self.layers.start:
                return _wide(made, torch.from_numpy(rng.standard_normal((tokens, made.config.hidden_size))))
            return torch.from_numpy(rng.integers(0, self.decoder.vocab_size, tokens))

        prompts = [Prompt(draw(min(TOKENS, made.max_context))) for _ in range(2)]
        c, length = made.config, far_position(made.config, made.max_context)
        if length <= TOKENS:
            return prompts
        if length * c.num_attention_heads * (c.qk_head_dim + c.v_head_dim) * 8 > FAR_BYTES:
            self.found.notes.append(f"positions near {length}: not searched: the reference would expand more than "
                                    f"{FAR_BYTES >> 20} MiB of keys and values there")
            return prompts
        return [*prompts, Prompt(draw(FAR_TOKENS), _Past(made, length, self.seed))]

    def run(self) -> None:
        """Go through the model."""
        self.reference.run(self.prompts, self._at_layer, self._see)

    def _at_layer(self, layer: int) -> None:
        self.progress(f"layer {layer} of {self.layers.start} to {self.layers.stop - 1}",
                      (layer - self.layers.start) / len(self.layers))

    # --- what the reference says, place by place ----------------------------------------------------------------------

    def _see(self, place: str, value: torch.Tensor) -> torch.Tensor:
        """Judge what ends at a place; the stream goes on rounded."""
        layer, _, rest = place.partition(".")
        if rest.startswith("rows."):
            self.rows = value
            return value
        if place == "head":
            self._head(value)
            return value
        rounded = _wide(self.made, value)
        if place == "embedding":
            self._embedding(value)
            self.stream = {"": rounded}
        else:
            self._branch(int(layer), rest, value, rounded)
        give_back()  # what a part took would stay with the process
        return rounded

    def _branch(self, layer: int, rest: str, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """Judge the branch of a layer that ended: `attention.0`, `mlp.0`, `experts`, `end`."""
        kind, _, half = rest.partition(".")
        before = self.stream["attention.0" if kind == "experts" else ""]
        wanted = {"output": exact} if kind == "experts" else {"output": exact - before, "sum": exact}
        starts = {"": before}
        if kind == "end":
            wanted, starts = {"sum": exact}, {"": before, "experts": self.stream["experts"]}
        name = "sum" if kind == "end" else f"{kind} {half}" if self.decoder.shortcut and half else kind
        attention = None
        if kind == "attention":
            attention = (layer - self.layers.start) * self.decoder.attentions_per_layer + int(half)
            wanted["rows"] = self.rows
        sure = self._sure(layer, kind, before)
        for g, walls in zip(self.graphs, self.walls, strict=True):
            def judge(g: GraphParts = g, walls: Mapping[str, str] = walls) -> Part:
                values, outputs = self._values(g, layer, rest)
                starting = {values[place]: value for place, value in starts.items()}
                model = g.cut(list(starting), [outputs[what] for what in wanted], walls)
                return self._judged(g, layer, name, model, starting, {outputs[w]: (w, v) for w, v in wanted.items()},
                                    attention, sure)

            self._guarded(g, layer, name, judge)
        if kind == "experts":
            self.stream["experts"] = rounded
        elif kind == "end":
            self.stream = {"": rounded}
        else:
            self.stream |= {"": rounded, rest: rounded}

    def _values(self, g: GraphParts, layer: int, rest: str) -> tuple[dict[str, str], dict[str, str]]:
        """A part's values in a graph: where it starts, by place, and what comes of it, by what is compared."""
        kind, _, half = rest.partition(".")
        order = _places(self.decoder)
        branch = g.branch(_node(self.decoder, layer, rest if kind != "experts" else "end"))
        if kind == "experts":
            return {"": g.branch(_node(self.decoder, layer, "attention.0")).total}, {"output": branch.added}
        position = order.index(rest)
        if position:
            before = g.branch(_node(self.decoder, layer, order[position - 1])).total
        else:
            first = layer == self.made.data["layers"][0]
            before = g.entrance if first else g.branch(_node(self.decoder, layer - 1, order[-1])).total
        outputs = {"output": branch.added, "sum": branch.total}
        if kind == "attention":
            start = self.made.data["layers"][0]
            outputs["rows"] = g.rows((layer - start) * self.decoder.attentions_per_layer + int(half))
        return {"": before, "experts": branch.added}, outputs

    def _sure(self, layer: int, kind: str, before: torch.Tensor) -> np.ndarray:
        """[N]: tokens that rounding alone cannot send to other experts."""
        c, exact = self.decoder, self.reference.routing
        routed = kind == "experts" or (kind == "mlp" and not c.shortcut and layer in c.sparse_layers)
        if not routed or exact is None or c.moe is None:
            return np.ones(len(before), bool)
        gap = turning_gap(c.moe, exact, self.narrow.routed(layer, c.moe, before))
        sure: np.ndarray = (exact.margin >= gap).numpy()
        return sure

    # --- parts that are run -------------------------------------------------------------------------------------------

    def _guarded(self, g: GraphParts, layer: int | None, name: str, judge: Callable[[], Part]) -> None:
        """A part that cannot be cut or run departs, and says why; the search goes on."""
        try:
            part = judge()
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            note = first if isinstance(error, CheckError) else f"{type(error).__name__}: {first}"
            part = Part(g.entry.name, layer, name, {}, "wiring", 0, note=note)
        self.found.parts.append(part)

    def _judged(self, g: GraphParts, layer: int | None, name: str, model: Any, starts: Mapping[str, torch.Tensor],
                wanted: Mapping[str, tuple[str, torch.Tensor]], attention: int | None, sure: np.ndarray) -> Part:
        """Run a cut part over its steps and compare what it gives, by name, with what the reference has there."""
        total, compared = len(next(iter(starts.values()))), dict[str, list[Difference]]()
        runs = _token_run(total) if attention is None else self._attention_runs(g.entry.kind)
        with PartSession(self.made, model, self.found.runtime) as session:
            for run in runs:
                flat = run.tokens.reshape(-1)
                rows = None if attention is None else self._past_rows(run, attention)
                feed = run.feed(self.made, session.names, -1 if attention is None else attention, rows)
                feed |= {value: _narrow(self.made, tensor[flat]) for value, tensor in starts.items()}
                for output, array in session.run({n: feed[n] for n in session.names}).items():
                    what, reference = wanted[output]
                    array = run.new_rows(array) if what == "rows" else array.reshape(len(flat), -1)
                    kept = sure[flat]
                    places = [self._place(int(t)) for t in flat[kept]]
                    d = compare(array[kept], reference[flat].numpy()[kept])
                    compared.setdefault(what, []).append(d.placed(("sequence", "token", "column"), places))
        worst = {what: worst_of(each) for what, each in compared.items()}
        judged = np.concatenate([sure[run.tokens.reshape(-1)] for run in runs])
        return Part(g.entry.name, layer, name, worst, _departs(worst, self.tolerance), int(judged.sum()),
                    int((~judged).sum()))

    def _place(self, token: int) -> tuple[int, int]:
        """Which sequence a token of all is of, and which of its tokens."""
        for sequence, prompt in enumerate(self.prompts):
            if token < len(prompt.inputs):
                return sequence, token
            token -= len(prompt.inputs)
        raise AssertionError

    def _attention_runs(self, kind: str) -> list[Run]:
        """The near sequences' last tokens behind their first ones, and all of the far one's behind its past."""
        near, new = len(self.prompts[0].inputs), NEW[kind]
        new = min(new, max(1, near - 1))
        runs = [Run(np.arange(2 * near).reshape(2, near)[:, near - new:], near - new)]
        if len(self.prompts) > 2:
            past = self.prompts[2].past
            assert isinstance(past, _Past)
            runs.append(Run(2 * near + np.arange(FAR_TOKENS)[None], past.length))
        return runs

    def _past_rows(self, run: Run, attention: int) -> np.ndarray:
        """[B, past, R] in the compute dtype."""
        first = self.prompts[0].inputs
        if run.tokens[0, 0] >= 2 * len(first):
            past = self.prompts[2].past
            assert past is not None
            return _narrow(self.made, past[attention])[None]
        return np.stack([_narrow(self.made, self.rows[start:start + run.past])
                         for start in range(0, 2 * len(first), len(first))])

    # --- the ends -----------------------------------------------------------------------------------------------------

    def _embedding(self, exact: torch.Tensor) -> None:
        if self.layers.start:
            return
        ids = torch.cat([p.inputs for p in self.prompts]).numpy()
        for g in self.graphs:
            def judge(g: GraphParts = g) -> Part:
                with PartSession(self.made, g.cut([], [g.entrance]), self.found.runtime) as session:
                    (found,) = session.run({"input_ids": ids[None]}).values()
                d = compare(found.reshape(len(ids), -1), exact.numpy()).placed(
                    ("sequence", "token", "column"), [self._place(t) for t in range(len(ids))])
                return Part(g.entry.name, None, "embedding", {"output": d}, _departs({"output": d}, self.tolerance),
                            len(ids))

            self._guarded(g, None, "embedding", judge)

    def _head(self, exact: torch.Tensor) -> None:
        """The final norm and head over every token, and which tokens the graph keeps for it."""
        last = _node(self.decoder, self.layers.stop - 1, _places(self.decoder)[-1])
        for g in self.graphs:
            def judge(g: GraphParts = g) -> Part:
                start = g.branch(last).total
                return self._judged(g, None, "head", g.cut([start], ["logits"]), {start: self.stream[""]},
                                    {"logits": ("output", exact)}, None, np.ones(len(exact), bool))

            self._guarded(g, None, "head", judge)
            if g.selection is not None:
                self._guarded(g, None, "last token", lambda g=g: self._selection(g))  # type: ignore[misc]

    def _selection(self, g: GraphParts) -> Part:
        assert g.selection is not None
        name, source = g.selection
        near = len(self.prompts[0].inputs)
        run, hidden = Run(np.arange(2 * near).reshape(2, near)), _narrow(self.made, self.stream[""][:2 * near])
        with PartSession(self.made, g.cut([source], [name], all_tokens=False), self.found.runtime) as session:
            feed = run.feed(self.made, session.names, -1, None) | {source: hidden}
            (found,) = session.run({n: feed[n] for n in session.names}).values()
        index = run.last if "last_token" in session.names else np.full(2, near - 1)
        d = compare(found, hidden[run.tokens[np.arange(2), index]]).placed(("sequence", "column"))
        return Part(g.entry.name, None, "last token", {"output": d}, _departs({"output": d}, EXACT), 2)


def _departs(found: Mapping[str, Difference], tolerance: Tolerance) -> str:
    """What departs first: rows before the output that attends them, an output before the sum with it."""
    for what, name in (("rows", "cache rows"), ("output", "output"), ("sum", "sum")):
        if what in found and not found[what].within(tolerance):
            return name
    return ""


def _places(decoder: DecoderConfig) -> list[str]:
    """Where a layer's residual stream is added to, in order."""
    return (["attention.0", "mlp.0", "attention.1", "mlp.1", "end"] if decoder.shortcut else ["attention.0", "mlp.0"])


def _node(decoder: DecoderConfig, layer: int, place: str) -> str:
    """The `Add` of a place in the graph."""
    kind, _, half = place.partition(".")
    name = {"attention": "attention", "mlp": "ffn", "end": "shortcut"}[kind]
    middle = f"_{half}" if decoder.shortcut and half else ""
    return f"layers/{layer}/{name}{middle}_residual"


def _walls(g: GraphParts, decoder: DecoderConfig, layers: range) -> dict[str, str]:
    """Every value of the residual stream, and where it is, in words."""
    words = {g.entrance: "before the first layer"}
    for layer in layers:
        for place in _places(decoder):
            if g.has(name := _node(decoder, layer, place)):
                words[g.branch(name).total] = f"behind {place.partition('.')[0]} of layer {layer}"
    return words


def _token_run(count: int) -> list[Run]:
    """All tokens side by side, for a part that does not mix them."""
    return [Run(np.arange(count)[None])]


def _narrow(made: Export, value: torch.Tensor) -> np.ndarray:
    rounded: np.ndarray = value.numpy().astype(DTYPES[made.dtype].numpy)
    return rounded


def _wide(made: Export, value: torch.Tensor) -> torch.Tensor:
    """Rounded to the compute dtype, as float64."""
    return torch.from_numpy(_narrow(made, value).astype(np.float64))
