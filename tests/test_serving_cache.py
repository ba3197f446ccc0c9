"""The server's cache: slots that stay dense, rows written by one copy, prefixes shared by blocks, bytes counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engines.cache import LatentCache, Staging
from engines.serving.pool import Limits, Pool
from engines.serving.prefixes import PrefixStore
from engines.serving.sequence import Request, Sequence
from engines.serving.slots import SlotCache
from exporter import manifest
from exporter.errors import InputError
from exporter.manifest import Export
from tests.test_generate import ATTENTIONS, MAX_CONTEXT, R, make_export

ROW = ATTENTIONS * R * 4  # bytes


@pytest.fixture
def export(tmp_path: Path) -> Export:
    return manifest.open_export(make_export(tmp_path / "export"))


def fill(cache: SlotCache, slot: int, rows: int, value: int) -> None:
    """Rows whose numbers say whose they are, where, and of which attention."""
    for i, stack in enumerate(cache.stacks["latent"]):
        stack[slot, :rows] = value + 100 * i + np.arange(rows)[:, None] / 1000
    cache.lengths[slot] = rows


def held(cache: LatentCache, slot: int) -> list[np.ndarray]:
    return [layer[slot, :cache.lengths[slot]].copy() for layer in cache.layers]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_slots_stay_dense(export: Export) -> None:
    cache = SlotCache(export, 4, 40)
    assert (cache.used, cache.slots, cache.nbytes) == (0, 4, 4 * 40 * ROW)
    for i, rows in enumerate((5, 9, 2)):
        assert cache.join() == i
        fill(cache, i, rows, 10 * (i + 1))
    last, second = held(cache, 2), held(cache, 1)
    assert cache.leave(0) == 2 * ROW  # the last one's two rows
    assert cache.lengths.tolist() == [2, 9]
    assert same(held(cache, 0), last)
    assert same(held(cache, 1), second)
    assert cache.leave(1) == 0  # it was the last: nothing moves
    slot, copied = cache.fork(0, 1)
    assert (slot, copied, cache.lengths.tolist()) == (1, ROW, [2, 1])
    assert np.array_equal(held(cache, 1)[1], last[1][:1])
    cache.truncate(0, 1)
    assert cache.lengths.tolist() == [1, 1]
    for said, call in (("it has 1", lambda: cache.fork(0, 2)), ("it has 1", lambda: cache.truncate(0, 2)),
                       ("2 are in use", lambda: cache.reserve(1, 40))):
        with pytest.raises(InputError, match=said):
            call()
    cache.join()
    cache.join()
    with pytest.raises(InputError, match="all 4 slots are taken"):
        cache.join()


def test_growth_copies_what_is_there_and_nothing_else(export: Export) -> None:
    cache = SlotCache(export, 2, 16)
    for rows in (7, 16):
        fill(cache, cache.join(), rows, rows)
    before = [held(cache, 0), held(cache, 1)]
    assert cache.reserve(2, 16) == 0
    assert cache.reserve(4, 32) == 2 * 16 * ROW  # the buffers' rows up to the longest
    assert (cache.slots, cache.capacity, cache.used, cache.nbytes) == (4, 32, 2, 4 * 32 * ROW)
    assert same(held(cache, 0), before[0])
    assert same(held(cache, 1), before[1])
    assert not cache.stacks["latent"][:, :, 16:].any()  # zero until written
    feed = cache.feed()
    assert feed["past_latent.1"].shape == (2, 32, R)
    assert feed["past_latent.1"].flags.c_contiguous
    assert np.shares_memory(feed["past_latent.1"], cache.stacks["latent"])
    one = cache.feed(slice(1, 2))
    assert one["past_latent.0"].shape == (1, 16, R)  # a prefix of one slot
    assert one["past_latent.0"].flags.c_contiguous


@pytest.mark.parametrize("staged", [True, False])
def test_one_copy_writes_ragged_rows_of_every_attention(export: Export, staged: bool) -> None:
    staging = Staging(export, 12) if staged else None
    cache = SlotCache(export, 3, 20, staging)
    for rows in (4, 0, 9):
        slot = cache.join()
        if rows:
            fill(cache, slot, rows, 1)
    expected, counts = [held(cache, b) for b in range(3)], [2, 4, 0]
    out = cache.out(3, 4)
    assert bool(out) == staged
    made = out or {f"new_latent.{i}": np.zeros((3, 4, R), np.float32) for i in range(ATTENTIONS)}
    for i in range(ATTENTIONS):
        made[f"new_latent.{i}"][:] = np.random.default_rng(i).standard_normal((3, 4, R))
    cache.commit(made, np.array(counts))
    assert cache.lengths.tolist() == [6, 4, 9]
    for b, count in enumerate(counts):
        for i in range(ATTENTIONS):
            whole = np.concatenate([expected[b][i], made[f"new_latent.{i}"][b, :count]])
            assert np.array_equal(held(cache, b)[i], whole)
    if staging is not None:
        assert staging.nbytes == 12 * ROW
        assert {id(array.base) for array in out.values()} == {id(out["new_latent.0"].base)}  # one buffer
        with pytest.raises(InputError, match="4 sequences of 4 new tokens; the staging buffer has 12 rows"):
            cache.out(4, 4)


def test_rows_of_another_step_are_not_taken_for_the_staged_ones(export: Export) -> None:
    cache = SlotCache(export, 1, 8, Staging(export, 4))
    cache.join()
    stale = cache.out(1, 2)
    stale["new_latent.0"][:] = 5
    fresh = {f"new_latent.{i}": np.full((1, 2, R), 7 + i, np.float32) for i in range(ATTENTIONS)}
    cache.commit(fresh, 2)
    assert [float(layer[0, 0, 0]) for layer in cache.layers] == [7, 8]


def test_concat_is_refused_for_serving(tmp_path: Path) -> None:
    export = manifest.open_export(make_export(tmp_path, form="concat"))
    for make in (lambda: SlotCache(export, 1, 8), lambda: Pool(export, Limits())):
        with pytest.raises(InputError, match=r"concat, which keeps one length for all .* export with --cache append"):
            make()


# --- Prefixes ---------------------------------------------------------------------------------------------------------


def stored(store: PrefixStore, ids: list[int], room: int = 1 << 40) -> int:
    def read(start: int, stop: int) -> dict[str, np.ndarray]:
        return {"latent": np.array(ids[start:stop], np.float32)[None, :, None]}  # 4 bytes a row

    return store.keep(ids, len(ids), read, 4, lambda size: store.nbytes + size <= room)


def tokens(blocks: list[object]) -> list[int]:
    return [int(x) for block in blocks for x in block.rows["latent"].reshape(-1)]  # type: ignore[attr-defined]


def test_prefixes_are_matched_token_by_token() -> None:
    store, text = PrefixStore(1 << 20, block=4), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert stored(store, text) == 2 * 4 * 4
    assert stored(store, text) == 0  # known
    assert tokens(store.match(text, 10)) == text[:8]
    assert tokens(store.match(text[:8], 7)) == text[:4]  # one token has to be computed
    assert tokens(store.match([1, 2, 3, 4, 9, 9, 9, 9], 8)) == text[:4]
    assert store.match([5, 6, 7, 8], 4) == []  # the second block does not begin a text
    assert store.match([1, 2, 3], 3) == []
    assert stored(store, [1, 2, 3, 4, 9, 9, 9, 9]) == 4 * 4  # the first block is shared
    assert len(store) == 3
    store.clear()
    assert (len(store), store.nbytes) == (0, 0)


def test_the_least_recently_used_goes_and_never_a_beginning_before_its_end() -> None:
    store = PrefixStore(4 * 16, block=4)  # four blocks
    first, second = list(range(12)), list(range(100, 108))
    assert stored(store, first) == 3 * 16
    assert stored(store, second) == 2 * 16  # the end of the first text went
    assert tokens(store.match(first, 12)) == first[:8]
    assert tokens(store.match(second, 8)) == second
    assert (store.nbytes, store.evicted) == (4 * 16, 1)
    assert stored(store, list(range(200, 220)), room=32) == 2 * 16  # the pool has no more
    assert store.nbytes == 32
    assert stored(PrefixStore(0, 4), first) == 0
    while store.evict():
        pass
    assert (len(store), store.nbytes, store.evict()) == (0, 0, 0)


# --- The pool ---------------------------------------------------------------------------------------------------------


def sequence(number: int, prompt: int, new: int = 8) -> Sequence:
    return Sequence(number, Request(tuple([number] * prompt), new), 0, 0.0)


def limits(rows: int, **changes: int) -> Limits:
    """A budget of so many rows beside the staging buffer of 16 rows."""
    return Limits(**{"sequences": 4, "chunk": 16, "budget": (rows + 16) * ROW, "prefixes": 0, "bucket": 16, "like": 32,
                     "block": 4, **changes})


def test_bytes_are_known_at_every_moment(export: Export) -> None:
    pool = Pool(export, limits(1000))
    assert pool.nbytes == pool.staging_bytes == 16 * ROW
    a, b, c = sequence(1, 10), sequence(2, 20), sequence(3, 100)
    assert pool.admit(a)
    assert pool.sequence_bytes == 16 * ROW
    assert pool.admit(b)  # the same group: two slots of 32 rows
    assert pool.sequence_bytes == 64 * ROW
    assert pool.admit(c)  # a group of its own
    assert sorted(pool.groups) == [32, 128]
    assert pool.sequence_bytes == (64 + 112) * ROW
    assert pool.peak == pool.nbytes
    pool.groups[32].lengths[:] = 10, 20
    assert pool.used_bytes == 30 * ROW
    pool.release(a)
    assert (b.slot, pool.copied["swap"]) == (0, 20 * ROW)
    pool.release(b)
    pool.release(c)
    pool.release(c)  # again: nothing
    assert (pool.sequence_bytes, pool.groups, pool.members) == (0, {}, {})


def test_what_does_not_fit_waits_and_nothing_is_changed(export: Export) -> None:
    pool = Pool(export, limits(64))
    a, b = sequence(1, 30), sequence(2, 30)
    assert pool.admit(a)
    assert not pool.admit(b)  # 32 rows held, 64 more wanted while the buffers grow
    assert b.capacity is None
    assert (pool.sequence_bytes, pool.peak) == (32 * ROW, 48 * ROW)
    assert pool.peak <= pool.limits.budget
    pool.release(a)
    assert pool.admit(b)


def test_a_sequence_moves_to_the_group_of_longer_ones(export: Export) -> None:
    pool = Pool(export, limits(1000))
    a, b = sequence(1, 30), sequence(2, 8)
    assert pool.admit(a)
    assert pool.admit(b)
    fill(pool.groups[32], a.slot, 32, 1)
    fill(pool.groups[32], b.slot, 8, 2)
    rows = [held(pool.groups[32], s.slot) for s in (a, b)]
    assert pool.extend(a, 33)
    assert pool.peak == pool.nbytes  # both groups, and no third copy on the way
    assert (a.capacity, b.slot, pool.copied["move"], pool.copied["swap"]) == (128, 0, 32 * ROW, 8 * ROW)
    assert same(held(pool.groups[128], a.slot), rows[0])
    assert same(held(pool.groups[32], b.slot), rows[1])
    assert pool.extend(b, 9)  # room that was there
    assert pool.sequence_bytes == (2 * 32 + 48) * ROW


def test_prefixes_make_way_for_sequences(export: Export) -> None:
    pool = Pool(export, limits(80, prefixes=40 * ROW))
    a = sequence(1, 30)
    assert pool.admit(a)
    fill(pool.groups[32], a.slot, 30, 1)
    pool.store(a)
    assert pool.prefixes.nbytes == 28 * ROW == pool.copied["store"]
    pool.release(a)
    twin = Sequence(2, Request(tuple([1] * 30 + [5]), 8), 0, 0.0)
    assert pool.admit(twin)
    assert (pool.length(twin), twin.reused, pool.copied["prefix"]) == (28, 28, 28 * ROW)
    assert not pool.admit(sequence(3, 60))
    pool.release(twin)
    assert pool.admit(sequence(4, 60))  # 64 rows of 80: blocks have to go
    assert pool.prefixes.evicted >= 3
    assert pool.nbytes <= pool.limits.budget


def test_limits_are_refused_by_name() -> None:
    for name, bad in (("sequences", 0), ("chunk", 0), ("budget", 0), ("queue", -1)):
        with pytest.raises(InputError, match=f"{name} is {bad}"):
            Limits(**{name: bad})


def test_max_context_bounds_the_buffers(export: Export) -> None:
    pool = Pool(export, limits(5000))
    long = sequence(1, MAX_CONTEXT - 5)
    assert pool.admit(long)
    assert pool.sequence_bytes == MAX_CONTEXT * ROW
