"""A latent cache whose sequences come and go: slots 0 to B − 1 stay dense, so that a step binds the first B of them.

The buffers grow by copying; whoever asks for that, for a fork or for a leaving sequence's place gets the bytes that
were copied, to count them.
"""

from __future__ import annotations

import numpy as np

from engines.cache import LatentCache, Staging
from engines.memory import HOST, Memory
from exporter.errors import InputError
from exporter.manifest import Export

Rows = dict[str, np.ndarray]  # part of a row -> [L, n, width]


class SlotCache(LatentCache):
    """A cache with room for `slots` sequences of `rows` rows, none taken yet; `lengths` is of those that are.

    append: the buffers are as long as `rows`; scatter: as the export's max-context. concat is not ragged: InputError.
    """

    def __init__(self, export: Export, slots: int, rows: int, staging: Staging | None = None, memory: Memory = HOST,
                 ) -> None:
        require_ragged(export)
        super().__init__(export, slots, rows, staging, memory)
        self._export, self._lengths = export, np.zeros(slots, np.int64)
        self._show(0)

    @property
    def slots(self) -> int:
        """Sequences that it has room for."""
        return len(self._lengths)

    @property
    def used(self) -> int:
        """Sequences in it."""
        return len(self.lengths)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row in all attentions."""
        return self._export.cache_bytes_per_token

    def reserve(self, slots: int, rows: int) -> int:
        """Make room, as much as there is already or more; the bytes of rows that were copied for it (0: it was there).
        `slots` may also be fewer than there are, down to those in use: growing is the time to let go of the rest."""
        if slots == self.slots and rows <= self.capacity:
            return 0
        if slots < self.used:
            raise InputError(f"reserve {slots} slots: {self.used} are in use")
        fresh = SlotCache(self._export, slots, max(rows, self.capacity), memory=self.memory)
        longest = int(self.lengths.max(initial=0))
        for part, stack in self.stacks.items():
            fresh.stacks[part][:, :self.used, :longest] = stack[:, :self.used, :longest]
        fresh._lengths[:self.used] = self.lengths
        used, self.stacks, self._lengths, self.capacity = self.used, fresh.stacks, fresh._lengths, fresh.capacity
        self._show(used)
        return used * longest * self.row_bytes

    def join(self) -> int:
        """The slot of a new, empty sequence. InputError where none is free: `reserve` first."""
        if self.used == self.slots:
            raise InputError(f"all {self.slots} slots are taken; reserve more first")
        slot = self.used
        self._lengths[slot] = 0
        self._show(slot + 1)
        return slot

    def leave(self, slot: int) -> int:
        """Free a slot; the last sequence's rows move into it where it was another. Bytes copied."""
        last = self.used - 1
        copied = 0 if slot == last else self._copy(last, slot, int(self.lengths[last]))
        self._show(last)
        return copied

    def fork(self, slot: int, rows: int) -> tuple[int, int]:
        """A new sequence that begins with the first `rows` rows of another: its slot, and the bytes copied."""
        if not 0 <= rows <= int(self.lengths[slot]):
            raise InputError(f"fork {rows} rows of slot {slot}: it has {int(self.lengths[slot])}")
        made = self.join()
        return made, self._copy(slot, made, rows)

    def view(self, slot: int, start: int, stop: int) -> Rows:
        """A sequence's rows where they lie, by part [L, n, width]."""
        return {part: stack[:, slot, start:stop] for part, stack in self.stacks.items()}

    def read(self, slot: int, start: int, stop: int) -> Rows:
        """A copy of them."""
        return {part: rows.copy() for part, rows in self.view(slot, start, stop).items()}

    def extend(self, slot: int, rows: Rows) -> int:
        """Put rows that were read elsewhere behind a sequence's own; bytes copied."""
        start = int(self.lengths[slot])
        count = int(next(iter(rows.values())).shape[1])
        for part, values in rows.items():
            self.stacks[part][:, slot, start:start + count] = values
        self.lengths[slot] += count
        return count * self.row_bytes

    def _copy(self, source: int, target: int, rows: int) -> int:
        for stack in self.stacks.values():
            stack[:, target, :rows] = stack[:, source, :rows]
        self._lengths[target] = rows
        return rows * self.row_bytes

    def _show(self, used: int) -> None:
        """What `feed` and `commit` see: the first `used` slots."""
        self.lengths = self._lengths[:used]
        self.parts = {part: list(stack[:, :used]) for part, stack in self.stacks.items()}


def require_ragged(export: Export) -> None:
    """InputError for a cache form that keeps one length for all sequences."""
    if export.cache not in ("append", "scatter"):
        raise InputError(f"{export.folder}: its cache form is {export.cache}, which keeps one length for all sequences "
                         "of a batch, so that none can join or leave; export with --cache append (or scatter)")
