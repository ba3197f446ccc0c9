"""Rows of prompts and answers that were computed before, by blocks of tokens, for sequences that begin alike.

A block is known by the block before it and by its own tokens, compared one by one: no hash can confuse two texts. The
least recently used go first; a block is always as recent as those behind it, so no block is ever without its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engines.serving.slots import Rows

BLOCK = 64  # tokens: what is shared is a multiple of it
Key = tuple[int, tuple[int, ...]]  # the number of the block before (0: none), and the tokens


@dataclass(frozen=True)
class Block:
    """`rows` of its tokens in every attention; `number` is what the blocks behind it name."""

    number: int
    rows: Rows

    @property
    def nbytes(self) -> int:
        """Bytes of its rows."""
        return sum(part.nbytes for part in self.rows.values())


class PrefixStore:
    """Up to `budget` bytes of blocks of `block` tokens; 0 keeps nothing."""

    def __init__(self, budget: int, block: int = BLOCK) -> None:
        self.budget, self.block, self.nbytes = budget, block, 0
        self.hit_tokens = self.evicted = 0
        self._blocks: OrderedDict[Key, Block] = OrderedDict()  # the least recently used first
        self._made = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, ids: Sequence[int], most: int) -> list[Block]:
        """The blocks that `ids` begin with, at most `most` tokens of them."""
        found = self._chain(ids, most)
        self._touch([key for key, _ in found])
        self.hit_tokens += len(found) * self.block
        return [block for _, block in found]

    def keep(self, ids: Sequence[int], rows: int, read: Callable[[int, int], Rows], row_bytes: int,
             room: Callable[[int], bool]) -> int:
        """Store the whole blocks among the first `rows` tokens of `ids`, those that are not there yet, as long as
        `room` says that a block's bytes fit. `read(start, stop)` copies rows. Bytes copied."""
        known = self._chain(ids, rows)
        keys, copied, size = [key for key, _ in known], 0, self.block * row_bytes
        before = known[-1][1].number if known else 0
        self._touch(keys)  # what this text begins with is the last to go
        for start in range(len(known) * self.block, rows - self.block + 1, self.block):
            if not self._make_room(size, room, keep=len(keys)):
                break
            self._made += 1
            key: Key = (before, tuple(ids[start:start + self.block]))
            self._blocks[key] = Block(self._made, read(start, start + self.block))
            before = self._made
            self.nbytes += size
            copied += size
            keys.append(key)
        self._touch(keys)
        return copied

    def evict(self) -> int:
        """Forget the least recently used block; the bytes that became free, 0 where there is none."""
        if not self._blocks:
            return 0
        _, block = self._blocks.popitem(last=False)
        self.nbytes -= block.nbytes
        self.evicted += 1
        return block.nbytes

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self.nbytes = 0

    def _make_room(self, size: int, room: Callable[[int], bool], keep: int) -> bool:
        """Evict others until a block fits; the `keep` most recent ones are what it stands on."""
        while not (fits := self.nbytes + size <= self.budget and room(size)) and len(self._blocks) > keep:
            self.evict()
        return fits

    def _chain(self, ids: Sequence[int], most: int) -> list[tuple[Key, Block]]:
        found: list[tuple[Key, Block]] = []
        before = 0
        for start in range(0, min(most, len(ids)) - self.block + 1, self.block):
            key = (before, tuple(ids[start:start + self.block]))
            if (block := self._blocks.get(key)) is None:
                break
            found.append((key, block))
            before = block.number
        return found

    def _touch(self, keys: list[Key]) -> None:
        """Most recently used, the beginning last of all."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)
