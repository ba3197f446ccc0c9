"""One operator, `mla::LatentAttention`, over the cached rows as they lie: a decode step that reads the cache once.

A graph of products reads it twice, once for the scores and once for the mix, and writes the scores down in between. The
operator is the project's own (engines/cpp/operator), a library that ONNX Runtime loads: graphs with it are written
where they are asked for.
"""

from __future__ import annotations

from exporter.formulations.common import CoreInputs
from exporter.graph import GraphBuilder

DOMAIN = "mla"
OPERATOR = "LatentAttention"


def build(g: GraphBuilder, core: CoreInputs) -> str:
    """[B, T*H, R] queries over past and new rows -> [B, T*H, d_c]."""
    past, new = core.segments  # of the append form, the only one that has it
    assert core.q_rows is not None
    assert core.dims.past_lengths is not None
    d_c = core.config.kv_lora_rank
    mixed = g.op(OPERATOR, core.q_rows, past.rows, core.dims.past_lengths, new.rows, name="attend",
                 domain=DOMAIN, latent=d_c)
    g.declare(mixed, g.dtype.onnx, [None, None, d_c])
    return mixed
