"""The memory of a server: caches for sequences of like length, a store of prefixes, one budget for all of it.

A group is one `SlotCache`; its key is the most rows that a sequence in it may have, so that short sequences do not pay
for long ones. Nothing here fails for want of memory: what does not fit is told, and the scheduler waits or preempts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from engines.cache import Staging
from engines.memory import HOST, Memory
from engines.serving.prefixes import BLOCK, PrefixStore
from engines.serving.sequence import Sequence
from engines.serving.slots import SlotCache, require_ragged
from exporter.errors import InputError
from exporter.manifest import Export


@dataclass(frozen=True)
class Limits:
    """What a server may use. Bytes are of cache buffers: `budget` of all, `prefixes` of the store in it (None: half).

    `sequences` run at a time, `queue` wait. `chunk`: tokens of a prefill step. `bucket`: rows that buffers grow by.
    `like`: rows of the shortest group; each further one takes sequences four times as long.
    """

    sequences: int = 8
    queue: int = 64
    chunk: int = 512
    budget: int = 1_000_000_000
    prefixes: int | None = None
    bucket: int = 256
    like: int = 1024
    block: int = BLOCK

    def __post_init__(self) -> None:
        for name in ("sequences", "chunk", "budget", "bucket", "like", "block"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.queue < 0 or (self.prefixes or 0) < 0:
            raise InputError(f"queue is {self.queue}, prefixes are {self.prefixes}; expected 0 or more")


class Pool:
    """Where sequences' rows lie. `copied` counts bytes of rows written since it was last cleared, by reason."""

    def __init__(self, export: Export, limits: Limits, memory: Memory = HOST) -> None:
        require_ragged(export)
        self.export, self.limits, self.memory = export, limits, memory
        self.row_bytes = export.cache_bytes_per_token
        self.groups: dict[int, SlotCache] = {}
        self.members: dict[int, list[Sequence]] = {}  # by group, in the order of their slots
        self.prefixes = PrefixStore(limits.budget // 2 if limits.prefixes is None else limits.prefixes, limits.block)
        self.staging = (Staging(export, max(limits.chunk, limits.sequences), memory) if export.cache == "append"
                        else None)
        self.copied: Counter[str] = Counter()
        self.peak = 0
        self._note()

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the groups' buffers."""
        return sum(group.nbytes for group in self.groups.values())

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffer that new rows come in."""
        return 0 if self.staging is None else self.staging.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is held at this moment."""
        return self.sequence_bytes + self.prefixes.nbytes + self.staging_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows that are valid, of those in `sequence_bytes`."""
        return sum(int(group.lengths.sum()) for group in self.groups.values()) * self.row_bytes

    def needed(self, rows: int) -> int:
        """Bytes that one sequence of so many rows needs where it is alone."""
        return self._rows(rows) * self.row_bytes + self.staging_bytes

    def admit(self, sequence: Sequence) -> bool:
        """Give a sequence a slot with room for `sequence.rows`, and the rows of its beginning that the store has; False
        where the budget has no room for it now."""
        key = self._key(sequence.rows)
        if not self._reserve(key, len(self.members.get(key, ())) + 1, sequence.rows):
            return False
        self._enter(sequence, key, self.groups[key].join())
        blocks = self.prefixes.match(sequence.ids, len(sequence.ids) - 1)  # the last token's logits are wanted
        for block in blocks:
            self.copied["prefix"] += self.groups[key].extend(sequence.slot, block.rows)
        sequence.reused = max(sequence.reused, len(blocks) * self.limits.block)
        return True

    def fork(self, source: Sequence, target: Sequence) -> bool:
        """Give `target` a slot beside `source` that begins with all its rows; False where there is no room."""
        assert source.capacity is not None
        group = self.groups[source.capacity]
        if not self._reserve(source.capacity, group.used + 1, group.capacity):
            return False
        slot, copied = group.fork(source.slot, self.length(source))
        self.copied["fork"] += copied
        self._enter(target, source.capacity, slot)
        target.reused = self.length(source)
        return True

    def extend(self, sequence: Sequence, rows: int) -> bool:
        """Make room for `rows` rows of a sequence that is in; False where the budget has none. It moves to the group of
        longer ones when it outgrows its own."""
        assert sequence.capacity is not None
        key = self._key(rows)
        if key <= sequence.capacity:
            return self._reserve(sequence.capacity, len(self.members[sequence.capacity]), rows)
        if not self._reserve(key, len(self.members.get(key, ())) + 1, rows):
            return False
        old, made = self.groups[sequence.capacity], self.groups[key].join()
        rows_there = old.view(sequence.slot, 0, self.length(sequence))
        self.copied["move"] += self.groups[key].extend(made, rows_there)
        self.release(sequence)
        self._enter(sequence, key, made)
        return True

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's slot at once, and the group's buffers with its last one."""
        if sequence.capacity is None:
            return
        key, members = sequence.capacity, self.members[sequence.capacity]
        self.copied["swap"] += self.groups[key].leave(sequence.slot)
        last = members.pop()
        if last is not sequence:
            members[sequence.slot], last.slot = last, sequence.slot
        if not members:
            del self.groups[key], self.members[key]
        sequence.capacity, sequence.slot = None, -1

    def store(self, sequence: Sequence) -> None:
        """Keep a sequence's rows for others that begin alike, as far as the budget has room without preempting."""
        if sequence.capacity is None or not self.prefixes.budget:
            return
        group, slot = self.groups[sequence.capacity], sequence.slot
        self.copied["store"] += self.prefixes.keep(
            sequence.ids, self.length(sequence), lambda start, stop: group.read(slot, start, stop), self.row_bytes,
            lambda size: self.nbytes + size <= self.limits.budget)
        self._note()

    def length(self, sequence: Sequence) -> int:
        """Rows of a sequence that are in the cache."""
        return 0 if sequence.capacity is None else int(self.groups[sequence.capacity].lengths[sequence.slot])

    def _enter(self, sequence: Sequence, key: int, slot: int) -> None:
        self.members.setdefault(key, []).append(sequence)
        sequence.capacity, sequence.slot = key, slot

    def _key(self, rows: int) -> int:
        """The most rows of the group that a sequence of `rows` belongs to."""
        if self.export.cache == "scatter":
            return self.export.max_context  # all have S_max rows anyhow
        key = self.limits.like
        while key < rows:
            key *= 4
        return key

    def _rows(self, rows: int) -> int:
        """Rows of a buffer for sequences of `rows`: whole buckets, so that shapes stay fixed for many steps."""
        if self.export.cache == "scatter":
            return self.export.max_context
        bucket = self.limits.bucket
        return min(-(-rows // bucket) * bucket, self.export.max_context)

    def _reserve(self, key: int, slots: int, rows: int) -> bool:
        """Room for `slots` sequences of `rows` rows in a group: a power of two of slots where that fits, else as many
        as are needed, for which prefixes have to go."""
        group, rows = self.groups.get(key), self._rows(rows)
        if group is not None and slots <= group.slots and rows <= group.capacity:
            return True
        rows = max(rows, 0 if group is None else group.capacity)
        roomy = min(1 << (slots - 1).bit_length(), max(self.limits.sequences, slots))
        for count in dict.fromkeys((roomy, slots)):
            size = count * rows * self.row_bytes  # beside the old buffers, until they are copied
            while count == slots and self.nbytes + size > self.limits.budget and self.prefixes.evict():
                pass
            if self.nbytes + size <= self.limits.budget:
                self._grow(key, group, count, rows, size)
                return True
        return False

    def _grow(self, key: int, group: SlotCache | None, slots: int, rows: int, size: int) -> None:
        self._note(size)
        if group is None:
            self.groups[key], self.members[key] = SlotCache(self.export, slots, rows, self.staging, self.memory), []
        else:
            self.copied["growth"] += group.reserve(slots, rows)

    def _note(self, more: int = 0) -> None:
        self.peak = max(self.peak, self.nbytes + more)
