"""The choices of the scheduler, each a small function of what is there."""

from __future__ import annotations

from collections.abc import Sequence as Many

from engines.serving.sequence import Sequence

PATIENCE = 4  # turns that shorter prompts may take from one that waits


def prefill_turn(prefilling: bool, decoding: bool, last_was_prefill: bool) -> bool:
    """Whether this step prefills: turn about with decoding, so that neither a long prompt nor many answers hold the
    other up for more than one step."""
    return prefilling and not (decoding and last_was_prefill)


def next_prefill(waiting: Many[Sequence], left: Many[int], chunk: int) -> Sequence:
    """Whose chunk is next: that with the fewest chunks to go (`left`: tokens), so that a short prompt does not wait for
    a long one's end; but of those that have waited four turns the first to come, so that none is put off for ever."""
    order = [(sequence.waited < PATIENCE, sequence.waited < PATIENCE and -(-tokens // chunk), sequence.admitted)
             for sequence, tokens in zip(waiting, left, strict=True)]
    return waiting[order.index(min(order))]


def victim(running: Many[Sequence]) -> Sequence:
    """Who gives its rows up when memory is short: the latest to come, who loses least."""
    return max(running, key=lambda sequence: sequence.admitted)
