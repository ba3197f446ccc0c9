"""How a graph holds its latent cache: append, scatter, concat, or no cache at all (bidirectional).

A cache form turns the new rows into the graph's cache outputs and tells the attention core which rows to attend, as
segments with their visibility. A core never knows which form it runs in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from exporter.graph import GraphBuilder


@dataclass(frozen=True)
class Dims:
    """Shape values and index ranges of one graph: 1-D int64 values B, T, S; `t` = 0..T-1; `query_token` [T*H] gives the
    token of each query column (queries are token-major: column t*H + h), H the heads that go together."""

    B: str
    T: str
    S: str | None
    t: str
    query_token: str
    past_lengths: str | None


@dataclass(frozen=True)
class Segment:
    """Rows to attend: `rows` [B, n, R], their count `n` (1-D int64 value), and a mask builder.

    `visible(rows_axis)` gives a boolean that broadcasts against scores of which axis `rows_axis` (1 or 2 of
    [B, ., .]) runs over the rows, the other over the T*H queries; None where every row is visible to every query.
    `written()` gives a boolean [B, n, 1] of the rows that hold anything, None where all do.
    """

    name: str
    rows: str
    n: str
    visible: Callable[[int], str | None]
    written: Callable[[], str | None] = lambda: None


def _axes(g: GraphBuilder, rows_axis: int) -> tuple[str, str]:
    """Unsqueeze axes that put a 1-D row index, and a 1-D query index, in their places of [B, ., .]."""
    return (g.ints(0, 2), g.ints(0, 1)) if rows_axis == 1 else (g.ints(0, 1), g.ints(0, 2))


def _row_index(g: GraphBuilder, n: str, rows_axis: int) -> str:
    count = g.op("Squeeze", n, name="row_count")
    index = g.op("Range", g.int_scalar(0), count, g.int_scalar(1), name="row_index")
    return g.op("Unsqueeze", index, _axes(g, rows_axis)[0], name="row_index_3d")


def _length(g: GraphBuilder, d: Dims) -> str:
    assert d.past_lengths is not None
    return g.op("Unsqueeze", d.past_lengths, g.ints(1, 2), name="past_length_3d")  # [B, 1, 1]


def _query_token(g: GraphBuilder, d: Dims, rows_axis: int) -> str:
    return g.op("Unsqueeze", d.query_token, _axes(g, rows_axis)[1], name="query_token_3d")


def _shared(g: GraphBuilder, name: str, make: Callable[[int], str]) -> Callable[[int], str]:
    """A mask by rows axis that all attentions of a graph share: it depends on lengths and positions alone."""
    return lambda rows_axis: g.once(f"{name}_{rows_axis}", partial(make, rows_axis))


def _new_rows(g: GraphBuilder, d: Dims, rows: str) -> Segment:
    """The new tokens themselves, causal: row j is visible to query token t when j <= t."""
    def visible(rows_axis: int) -> str:
        return g.op("LessOrEqual", _row_index(g, d.T, rows_axis), _query_token(g, d, rows_axis), name="causal")

    return Segment("new", rows, d.T, _shared(g, "new_visible", visible))


def append(g: GraphBuilder, d: Dims, new_rows: str, index: int) -> list[Segment]:
    """The past is read only and `new_latent` (the caller's output) is all that is returned: no copy of the cache."""
    def within_length(rows_axis: int) -> str:
        return g.op("Less", _row_index(g, d.S or "", rows_axis), _length(g, d), name="within_length")

    visible = _shared(g, "past_visible", within_length)
    past = Segment("past", f"past_latent.{index}", d.S or "", visible, partial(visible, 1))
    return [past, _new_rows(g, d, new_rows)]


def scatter(g: GraphBuilder, d: Dims, new_rows: str, index: int) -> list[Segment]:
    """A preallocated cache updated in place at each sequence's length; attention runs over the updated cache."""
    update = g.op("Unsqueeze", new_rows, g.ints(1), name="update_4d")  # [B, 1, T, R]
    assert d.past_lengths is not None
    cache = g.op("TensorScatter", f"latent_cache.{index}", update, d.past_lengths, name="update_cache", axis=-2,
                 mode="linear", output=f"latent_cache_out.{index}")
    rows = g.op("Squeeze", cache, g.ints(1), name="cache_rows")  # [B, S_max, R]
    assert d.S is not None

    def visible(rows_axis: int) -> str:
        position = g.op("Add", _length(g, d), _query_token(g, d, rows_axis), name="query_position")
        return g.op("LessOrEqual", _row_index(g, d.S or "", rows_axis), position, name="causal")

    def written(rows_axis: int) -> str:
        end = g.op("Add", _length(g, d), d.T, name="end")
        return g.op("Less", _row_index(g, d.S or "", rows_axis), end, name="before_end")

    return [Segment("cache", rows, d.S, _shared(g, "cache_visible", visible),
                    partial(_shared(g, "cache_written", written), 1))]


def concat(g: GraphBuilder, d: Dims, new_rows: str, index: int) -> list[Segment]:
    """past -> present, as older tools expect. New rows land at S; rows between past_lengths and S stay invisible."""
    present = g.op("Concat", f"past_latent.{index}", new_rows, name="join", axis=1, output=f"present_latent.{index}")
    S = d.S
    assert S is not None
    n = g.once("present_rows", lambda: g.op("Add", S, d.T, name="count"))

    def visible(rows_axis: int) -> str:
        row = _row_index(g, n, rows_axis)
        past = g.op("Less", row, _length(g, d), name="within_length")
        offset = g.op("Sub", row, S, name="new_index")
        is_new = g.op("GreaterOrEqual", row, S, name="is_new")
        causal = g.op("LessOrEqual", offset, _query_token(g, d, rows_axis), name="causal")
        return g.op("Or", past, g.op("And", is_new, causal, name="new_visible"), name="visible")

    def written(rows_axis: int) -> str:
        row = _row_index(g, n, rows_axis)
        past = g.op("Less", row, _length(g, d), name="within_length")
        return g.op("Or", past, g.op("GreaterOrEqual", row, S, name="is_new"), name="written")

    return [Segment("present", present, n, _shared(g, "present_visible", visible),
                    partial(_shared(g, "present_written", written), 1))]


def bidirectional(g: GraphBuilder, d: Dims, new_rows: str, index: int) -> list[Segment]:
    """No past, no mask: every token attends every token (`--causal off`)."""
    return [Segment("new", new_rows, d.T, lambda rows_axis: None)]


FORMS: dict[str, Callable[[GraphBuilder, Dims, str, int], list[Segment]]] = {
    "append": append, "scatter": scatter, "concat": concat, "none": bidirectional,
}
