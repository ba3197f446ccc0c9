"""A host-side latent cache that feeds any cache form and keeps what a step returns.

One row of R numbers per token and attention, nothing per head; of a quantised cache its latent in 8 bits, its scale and
its rotary key. Rows beyond a sequence's length are zero until written.
"""

from __future__ import annotations

import numpy as np

from engines.session import Outputs
from exporter.dtypes import DTYPES, NUMPY_OF_NAME
from exporter.errors import InputError
from exporter.manifest import Export


class LatentCache:
    """`batch` sequences of up to `capacity` rows in every attention of an export.

    Without `capacity` there is room for the export's max-context.
    append: `feed` binds the first S rows of the buffers with no copy when batch is 1 or S is the capacity.
    scatter: the buffers are the graph's own S_max rows, whatever `capacity` says, and are updated in place.
    concat: the present that a step returned is the next step's past; the buffers grow by the rows that are kept.
    """

    def __init__(self, export: Export, batch: int, capacity: int | None = None) -> None:
        if batch < 1:
            raise InputError(f"batch is {batch}; expected at least 1")
        if capacity is not None and not 1 <= capacity <= export.max_context:
            raise InputError(f"capacity is {capacity} rows; expected 1 to {export.max_context}, the export's "
                             "max-context")
        self.form = export.cache
        self.capacity = export.max_context if capacity is None or self.form == "scatter" else capacity
        rows = self.capacity if self.form in ("append", "scatter") else 1  # concat: an empty past is one dummy row
        self.parts = _buffers(export, batch, rows)
        self.lengths = np.zeros(batch, np.int64)

    @property
    def layers(self) -> list[np.ndarray]:
        """Each attention's buffer [B, S, R]; of a quantised cache its latents [B, S, d_c] in 8 bits."""
        return self.parts["latent"]

    @property
    def rows(self) -> np.ndarray:
        """The first attention's buffer (at layer scope the only one)."""
        return self.layers[0]

    @property
    def quantised(self) -> bool:
        """Whether a row is three: `parts` has `latent`, `scale` and `rope`, each by attention."""
        return len(self.parts) > 1

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(rows.nbytes for layers in self.parts.values() for rows in layers)

    def load(self, rows: np.ndarray, lengths: np.ndarray, attention: int = 0) -> None:
        """Start from rows [B, S, R] of which the first `lengths` [B] are valid. InputError for a quantised cache, whose
        rows only a graph makes: fill `parts`."""
        if self.quantised:
            raise InputError("load: the cache holds latents in 8 bits, which a graph makes of rows (commit); write "
                             "latents, scales and rotary keys into parts")
        batch, _, width = self.rows.shape
        if rows.ndim != 3 or rows.shape[::2] != (batch, width) or rows.shape[1] > self.capacity:
            raise InputError(f"rows have shape {list(rows.shape)}; expected [{batch}, S, {width}], S at most the "
                             f"capacity, {self.capacity}")
        if self.form == "concat":
            self.layers[attention] = np.ascontiguousarray(rows.astype(self.rows.dtype))
        else:
            self.layers[attention][:, : rows.shape[1]] = rows
        self.lengths[:] = lengths

    def feed(self) -> dict[str, np.ndarray]:
        """The cache inputs of one step."""
        if self.form == "none":
            return {}
        feed = {"past_lengths": self.lengths.copy()}
        # batch 1: a prefix of the buffer is contiguous; more: the whole buffer, whose tail the lengths hide
        S = max(int(self.lengths.max()), 1) if len(self.lengths) == 1 else self.rows.shape[1]
        for part, layers in self.parts.items():
            for i, rows in enumerate(layers):
                if self.form == "scatter":
                    feed[f"latent_cache.{i}"] = rows[:, None]
                else:
                    feed[f"past_{part}.{i}"] = rows if self.form == "concat" else rows[:, :S]
        return feed

    def commit(self, outputs: Outputs, counts: np.ndarray | int) -> None:
        """Keep the first `counts` [B] new rows of each sequence (the rest was right padding).

        InputError, with nothing kept, where the step did not compute as many rows or the cache has no room for them.
        """
        given = np.asarray(counts, np.int64)
        if given.ndim and given.shape != self.lengths.shape:
            raise InputError(f"counts have shape {list(given.shape)}; expected [{len(self.lengths)}], one per sequence")
        counts = np.broadcast_to(given, self.lengths.shape)
        made = self._new_rows(outputs)
        if counts.min() < 0 or (made is not None and counts.max() > made):
            raise InputError(f"{counts.tolist()} new rows to keep; expected 0 to {made}, the new tokens of the step")
        if int((self.lengths + counts).max()) > self.capacity:
            raise InputError(f"{self.lengths.tolist()} rows and {counts.tolist()} new ones exceed the capacity of "
                             f"{self.capacity}; make a cache of a larger capacity")
        if self.form == "concat" and (counts != counts[0]).any():
            raise InputError(f"concat keeps one length for all; new tokens {counts.tolist()} differ")
        if not counts.any():
            return  # concat's empty past keeps its dummy row: S is at least 1
        for i in range(len(self.layers)):
            if self.form == "concat":
                # new rows lie at S, so an empty past (S = 1, length 0) leaves its dummy row in front
                present, S = outputs[f"present_latent.{i}"], self.layers[i].shape[1]
                start = S if not self.lengths.any() else 0
                kept = int(counts[0]) + (0 if start else S)
                self.layers[i] = np.ascontiguousarray(present[:, start:start + kept])
            elif self.form == "append":
                for part, layers in self.parts.items():
                    for b, (start, count) in enumerate(zip(self.lengths, counts, strict=True)):
                        layers[i][b, start:start + count] = outputs[f"new_{part}.{i}"][b, :count]
        self.lengths += counts

    def _new_rows(self, outputs: Outputs) -> int | None:
        """How many new tokens a step computed; None where its outputs do not tell (a scatter model's do not)."""
        for name in ("attn_output", "hidden_states_out", "new_latent.0"):
            if name in outputs:
                return int(outputs[name].shape[1])
        if self.form == "concat":
            return int(outputs["present_latent.0"].shape[1] - self.rows.shape[1])
        return None


def _buffers(export: Export, batch: int, rows: int) -> dict[str, list[np.ndarray]]:
    """Zeros, `rows` of them for each sequence, by part of a row and by attention."""
    c, wide = export.config, DTYPES[export.dtype].numpy
    widths = {"latent": (c.row_dim, wide)}
    if export.quantised_cache:
        widths = {"latent": (c.kv_lora_rank, NUMPY_OF_NAME[export.cache_dtype]), "scale": (1, wide),
                  "rope": (c.qk_rope_head_dim, wide)}
    return {part: [np.zeros((batch, rows, width), dtype) for _ in range(export.attentions)]
            for part, (width, dtype) in widths.items()}
