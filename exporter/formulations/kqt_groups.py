"""`rows @ q^T` for a prefill, a few heads at a time, each group after the one before.

Scores of many tokens outweigh everything else, and `kqt` holds them for all heads at once. Here they exist for a few: 4
of 16 heads take a quarter. Every group reads the cache anew, which a step of hundreds of queries hides behind its
operations and a decode step would not.
"""

from __future__ import annotations

from exporter.config import MLAConfig
from exporter.formulations import kqt
from exporter.formulations.common import CoreInputs, heads_at_once
from exporter.graph import GraphBuilder
from exporter.sequencing import values_after


def fits(config: MLAConfig, target: str) -> bool:
    """Heads that make more than one group; with one this is `kqt`."""
    return heads_at_once(config) < config.num_attention_heads


def build(g: GraphBuilder, core: CoreInputs) -> str:
    """[B, T*H, R] queries over the segments -> [B, T*H, d_c]."""
    c, d = core.config, core.dims
    assert core.q_rows is not None
    at_once, H = heads_at_once(c), c.num_attention_heads

    def by_head(rows: str, heads: int, width: int, name: str) -> str:
        shape = g.op("Concat", d.B, d.T, g.ints(heads, width), name=f"{name}_shape", axis=0)
        return g.op("Reshape", rows, shape, name=name)

    def flat(rows: str, width: int, name: str) -> str:
        shape = g.op("Concat", d.B, g.ints(-1, width), name=f"{name}_shape", axis=0)
        return g.op("Reshape", rows, shape, name=name)

    queries = g.ops("Split", by_head(core.q_rows, H, c.row_dim, "queries_by_head"),
                    g.ints(*[at_once] * (H // at_once)), name="split_queries", axis=2, count=H // at_once)
    parts: list[str] = []
    for number, query in enumerate(queries):
        with g.scope(f"heads_{number * at_once}"):
            if parts:
                stacked = g.op("Unsqueeze", query, g.ints(0), name="stacked")
                waited = values_after(g, stacked, parts[-1], "waited", 0, 1, 2, 3)
                query = g.op("Squeeze", waited, g.ints(0), name="query")
            probs = kqt.probabilities(g, core, flat(query, c.row_dim, "queries"))
            mixed = kqt.mixed(g, core, [kqt.mix(g, s, p) for s, p in zip(core.segments, probs, strict=True)])
            parts.append(by_head(mixed, at_once, c.kv_lora_rank, "latents"))  # [B, T, at_once, d_c]
    return flat(g.op("Concat", *parts, name="all_heads", axis=2), c.kv_lora_rank, "latents")
