"""The absorption audit: whether a graph attends a latent cache as it lies, judged from its nodes and shapes alone.

In the absorbed form W_UK is on the query's side and W_UV on the output's, so no tensor has a number per cached row,
head and column: rows meet queries as they are cached. The audit follows the cache through the graph (dataflow.py), asks
where the columns of each cache row come from (columns.py), and calls a fault what stands in the way, by node. Weights
are never read, and what it cannot see through is a fault of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exporter.errors import InputError
from exporter.families import text_config
from exporter.manifest import NAME, open_export
from validate.absorption_checks import Audit, Finding
from validate.absorption_costs import Costs, Sizes, costs
from validate.absorption_parts import Parts
from validate.dataflow import FEW_ROWS, MANY_ROWS, Flow, find_roles
from validate.graph_shapes import Graph

KINDS = ("decode", "prefill")


@dataclass(frozen=True)
class Verdict:
    """What the audit says of one graph. `judged`: the form that it was held against, absorbed or latent (a prefill
    graph may rebuild K and V if it says so, but not cache them)."""

    graph: str
    kind: str
    judged: str
    attentions: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    absorbed_at: dict[str, str]
    costs: Costs

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {**asdict(self), "pass": self.passed, "findings": [f.to_dict() for f in self.findings],
                "costs": self.costs.to_dict()}


def audit(what: Path, *, kind: str | None = None, config: Path | None = None,
          progress: Callable[..., None] = lambda message, share=None: None) -> list[Verdict]:
    """Judge one .onnx file, or every graph of an export's folder. `kind` is of a graph that does not say its own;
    `config` a Hugging Face config.json with the sizes that it does not say."""
    sizes = _config_sizes(config) if config else Sizes()
    found = []
    for number, path in enumerate(paths := _files(what)):
        progress(path.name, number / len(paths))
        found.append(judge(path, kind, sizes))
    return found


def judge(path: Path, kind: str | None = None, sizes: Sizes | None = None) -> Verdict:
    """The verdict on one file. InputError for what is no ONNX graph with a cache."""
    graph = Graph(path)
    own = graph.metadata
    declared = own.get("mla.kind")
    if kind and declared and kind != declared:
        raise InputError(f"--kind {kind}: {path} says of itself that it is a {declared} graph; leave --kind out")
    kind = declared or kind or "decode"
    expanded = kind == "prefill" and own.get("mla.prefill_form", "expanded") == "expanded"
    sizes = (sizes or Sizes()).completed_by(_own_sizes(graph))
    roles = find_roles(graph)
    flow = Flow(graph, roles, *(graph.shapes(roles.sizes[rows]) for rows in (FEW_ROWS, MANY_ROWS)))
    parts = Parts(flow)
    checked = Audit(parts, sizes, expanded)
    findings = tuple(checked.findings())
    return Verdict(path.name, kind, "latent" if expanded else "absorbed", len(parts.attentions), findings,
                   tuple(checked.notes), checked.absorbed_at, costs(flow, sizes.completed_by(parts.sizes())))


def to_dict(verdicts: list[Verdict]) -> dict[str, Any]:
    """JSON form of an audit: the findings of all graphs together, and each graph by itself."""
    return {"pass": all(v.passed for v in verdicts),
            "findings": [{"graph": v.graph, **f.to_dict()} for v in verdicts for f in v.findings],
            "graphs": [v.to_dict() for v in verdicts]}


def _files(what: Path) -> list[Path]:
    if not what.is_dir():
        return [what]
    if (what / NAME).is_file():
        export = open_export(what)
        return [what / entry.file for entry in export.graphs]
    inside = sorted(what.glob("*.onnx"))
    hint = f"; give one of {', '.join(p.name for p in inside[:4])} in it" if inside else ""
    raise InputError(f"{what}: a folder without {NAME}; expected a .onnx file, or a folder that `python -m exporter "
                     f"export` made{hint}")


def _own_sizes(graph: Graph) -> Sizes:
    """What a graph of this toolkit says of itself; nothing where it is none, or where that does not read."""
    try:
        c = json.loads(graph.metadata["mla.config"])
        return Sizes(c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"], c["qk_nope_head_dim"],
                     c["v_head_dim"])
    except (KeyError, TypeError, ValueError):
        return Sizes()


def _config_sizes(path: Path) -> Sizes:
    fields = ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    try:
        raw = text_config(json.loads(path.read_text(encoding="utf-8")))
        found = [raw[name] for name in fields]
    except OSError as error:
        raise InputError(f"--config {path}: {error.strerror}; expected a Hugging Face config.json") from None
    except KeyError as error:
        raise InputError(f"--config {path}: no {error.args[0]}; expected the config.json of an MLA model, with "
                         f"{', '.join(fields)}") from None
    except (ValueError, TypeError, AttributeError):
        raise InputError(f"--config {path}: not a JSON object; expected a Hugging Face config.json") from None
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in found):
        raise InputError(f"--config {path}: {dict(zip(fields, found, strict=True))}; expected positive whole numbers")
    return Sizes(*found)
