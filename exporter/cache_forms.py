"""How a graph holds its latent cache: append, scatter, concat, or no cache at all (bidirectional).

A cache form turns the new rows into the graph's cache outputs and tells the attention core which rows to attend, as
segments with their visibility. A core never knows which form it runs in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from exporter.graph import GraphBuilder
from exporter.quantised_rows import QuantisedRows, quantise, read


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

    `rows` is made where it is first asked for: of a quantised cache it is a copy, and `narrow` what lies in it.
    `visible(rows_axis)` gives a boolean that broadcasts against scores of which axis `rows_axis` (1 or 2 of
    [B, ., .]) runs over the rows, the other over the T*H queries; None where every row is visible to every query.
    `written()` gives a boolean [B, n, 1] of the rows that hold anything, None where all do.
    `among(index)` gives `visible(1)` of the rows with the numbers `index` [m] alone, which may pass n: None where
    `visible` is.
    """

    name: str
    make_rows: Callable[[], str]
    n: str
    visible: Callable[[int], str | None]
    written: Callable[[], str | None] = lambda: None
    among: Callable[[str], str | None] = lambda index: None
    narrow: QuantisedRows | None = None

    @cached_property
    def rows(self) -> str:
        return self.make_rows()


def _axes(g: GraphBuilder, rows_axis: int) -> tuple[str, str]:
    """Unsqueeze axes that put a 1-D row index, and a 1-D query index, in their places of [B, ., .]."""
    return (g.ints(0, 2), g.ints(0, 1)) if rows_axis == 1 else (g.ints(0, 1), g.ints(0, 2))


def _row_index(g: GraphBuilder, n: str, rows_axis: int) -> str:
    count = g.op("Squeeze", n, name="row_count")
    index = g.op("Range", g.int_scalar(0), count, g.int_scalar(1), name="row_index")
    return _as_rows(g, index, rows_axis)


def _as_rows(g: GraphBuilder, index: str, rows_axis: int) -> str:
    return g.op("Unsqueeze", index, _axes(g, rows_axis)[0], name="row_index_3d")


def _length(g: GraphBuilder, d: Dims) -> str:
    assert d.past_lengths is not None
    return g.op("Unsqueeze", d.past_lengths, g.ints(1, 2), name="past_length_3d")  # [B, 1, 1]


def _query_token(g: GraphBuilder, d: Dims, rows_axis: int) -> str:
    return g.op("Unsqueeze", d.query_token, _axes(g, rows_axis)[1], name="query_token_3d")


def _shared(g: GraphBuilder, name: str, make: Callable[[int], str]) -> Callable[[int], str]:
    """A mask by rows axis that all attentions of a graph share: it depends on lengths and positions alone."""
    return lambda rows_axis: g.once(f"{name}_{rows_axis}", partial(make, rows_axis))


Mask = Callable[[str, int], str]  # (row numbers as they lie in [B, ., .], rows axis) -> a boolean that broadcasts


def _masks(g: GraphBuilder, name: str, n: str, make: Mask) -> tuple[Callable[[int], str], Callable[[str], str]]:
    """`visible` and `among` of a segment of n rows, from the mask of any row numbers."""
    return (_shared(g, name, lambda rows_axis: make(_row_index(g, n, rows_axis), rows_axis)),
            lambda index: make(_as_rows(g, index, 1), 1))


def _causal(g: GraphBuilder, d: Dims) -> Mask:
    """Among the new tokens themselves: row j is visible to query token t when j <= t."""
    return lambda row, rows_axis: g.op("LessOrEqual", row, _query_token(g, d, rows_axis), name="causal")


def _within_length(g: GraphBuilder, d: Dims) -> Mask:
    return lambda row, rows_axis: g.op("Less", row, _length(g, d), name="within_length")


def append(g: GraphBuilder, d: Dims, new_rows: str, index: int) -> list[Segment]:
    """The past is read only and `new_latent` (the caller's output) is all that is returned: no copy of the cache."""
    visible, among = _masks(g, "past_visible", d.S or "", _within_length(g, d))
    new_visible, among_new = _masks(g, "new_visible", d.T, _causal(g, d))
    return [Segment("past", lambda: f"past_latent.{index}", d.S or "", visible, partial(visible, 1), among),
            Segment("new", lambda: new_rows, d.T, new_visible, among=among_new)]


def append_quantised(g: GraphBuilder, d: Dims, latent: str, rope: str, index: int, dtype: str) -> list[Segment]:
    """The same over a cache in 8 bits, from new latents [B, T, d_c] and rotary keys [B, T, d_r] (`new_rope`). New rows
    are attended as they will be read back, so that it does not matter where one step ends and the next begins."""
    visible, among = _masks(g, "past_visible", d.S or "", _within_length(g, d))
    new_visible, among_new = _masks(g, "new_visible", d.T, _causal(g, d))
    codes, scale = quantise(g, latent, dtype, (f"new_latent.{index}", f"new_scale.{index}"))
    past = read(g, f"past_latent.{index}", f"past_scale.{index}", f"past_rope.{index}", visible(1), "past")
    new = read(g, codes, scale, rope, None, "new")
    return [Segment("past", lambda: past.rows(g, "past"), d.S or "", visible, partial(visible, 1), among, past),
            Segment("new", lambda: new.rows(g, "new"), d.T, new_visible, among=among_new, narrow=new)]


def scatter(g: GraphBuilder, d: Dims, new_rows: str, index: int) -> list[Segment]:
    """A preallocated cache updated in place at each sequence's length; attention runs over the updated cache."""
    update = g.op("Unsqueeze", new_rows, g.ints(1), name="update_4d")  # [B, 1, T, R]
    assert d.past_lengths is not None
    cache = g.op("TensorScatter", f"latent_cache.{index}", update, d.past_lengths, name="update_cache", axis=-2,
                 mode="linear", output=f"latent_cache_out.{index}")
    rows = g.op("Squeeze", cache, g.ints(1), name="cache_rows")  # [B, S_max, R]
    assert d.S is not None

    def up_to_query(row: str, rows_axis: int) -> str:
        position = g.op("Add", _length(g, d), _query_token(g, d, rows_axis), name="query_position")
        return g.op("LessOrEqual", row, position, name="causal")

    def before_end(row: str, rows_axis: int) -> str:
        end = g.op("Add", _length(g, d), d.T, name="end")
        return g.op("Less", row, end, name="before_end")

    visible, among = _masks(g, "cache_visible", d.S, up_to_query)
    written, _ = _masks(g, "cache_written", d.S, before_end)
    return [Segment("cache", lambda: rows, d.S, visible, partial(written, 1), among)]


def concat(g: GraphBuilder, d: Dims, new_rows: str, index: int) -> list[Segment]:
    """past -> present, as older tools expect. New rows land at S; rows between past_lengths and S stay invisible."""
    present = g.op("Concat", f"past_latent.{index}", new_rows, name="join", axis=1, output=f"present_latent.{index}")
    S = d.S
    assert S is not None
    n = g.once("present_rows", lambda: g.op("Add", S, d.T, name="count"))

    def past_or_causal(row: str, rows_axis: int) -> str:
        past = g.op("Less", row, _length(g, d), name="within_length")
        offset = g.op("Sub", row, S, name="new_index")
        is_new = g.op("GreaterOrEqual", row, S, name="is_new")
        causal = g.op("LessOrEqual", offset, _query_token(g, d, rows_axis), name="causal")
        return g.op("Or", past, g.op("And", is_new, causal, name="new_visible"), name="visible")

    def past_or_new(row: str, rows_axis: int) -> str:
        past = g.op("Less", row, _length(g, d), name="within_length")
        return g.op("Or", past, g.op("GreaterOrEqual", row, S, name="is_new"), name="written")

    visible, among = _masks(g, "present_visible", n, past_or_causal)
    written, _ = _masks(g, "present_written", n, past_or_new)
    return [Segment("present", lambda: present, n, visible, partial(written, 1), among)]


def bidirectional(g: GraphBuilder, d: Dims, new_rows: str, index: int) -> list[Segment]:
    """No past, no mask: every token attends every token (`--causal off`)."""
    return [Segment("new", lambda: new_rows, d.T, lambda rows_axis: None)]


FORMS: dict[str, Callable[[GraphBuilder, Dims, str, int], list[Segment]]] = {
    "append": append, "scatter": scatter, "concat": concat, "none": bidirectional,
}
