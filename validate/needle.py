"""Long-context retrieval: a sentence with a number at some depth of generated text, and whether an answer gives it.

The text is seeded sentences without a digit in them, cut to a number of words exactly; every needle has a number of its
own, so none can be answered from another prompt, nor guessed.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from exporter.errors import InputError

EXACT, WITHIN, MISSED = "exact", "within", "missed"
SENTENCE = "The secret number of the lighthouse keeper is {number}."
QUESTION = "What is the secret number of the lighthouse keeper? Answer with the number alone."
LEAST = 50  # words of text: below it there is no depth to speak of
ADJECTIVES = ("quiet", "narrow", "old", "green", "patient", "distant", "wooden", "bright", "hollow", "northern",
              "early", "careful", "empty", "heavy", "painted")
NOUNS = ("river", "market", "carpenter", "bridge", "garden", "letter", "winter", "village", "harbour", "teacher",
         "orchard", "train", "window", "clockmaker", "forest", "ferry", "kitchen", "shepherd", "tower", "road")
VERBS = ("waits for", "remembers", "passes", "borrows from", "looks towards", "grows beside", "follows", "belongs to",
         "changes", "forgets")
ENDS = ("", "in the evening", "after the rain", "without a word", "as it did every year", "before the others arrive",
        "and nobody minds", "on the far side of the hill")


@dataclass(frozen=True)
class Needle:
    """Where it lies, percent of the text's sentences before it, in a text of `context` words; what is to be found."""

    context: int
    depth: int
    number: str

    @property
    def text(self) -> str:
        """The words that hold the needle, `context` of them, its own included; the same each time."""
        draw, needle = random.Random(f"text {self.number}"), SENTENCE.format(number=self.number)
        left, sentences = self.context - len(needle.split()), list[str]()
        while left > 0:
            words = f"The {draw.choice(ADJECTIVES)} {draw.choice(NOUNS)} {draw.choice(VERBS)} the " \
                    f"{draw.choice(ADJECTIVES)} {draw.choice(NOUNS)} {draw.choice(ENDS)}".split()[:left]
            sentences.append(f"{' '.join(words)}.")
            left -= len(words)
        sentences.insert(round(len(sentences) * self.depth / 100), needle)
        return " ".join(sentences)

    @property
    def question(self) -> str:
        """The whole prompt: the text, and what is asked of it."""
        return f"{self.text}\n\n{QUESTION}"

    def verdict(self, answer: str) -> str:
        """`exact`: the answer's first line is the number, but for punctuation around it; `within`: it is somewhere in
        the answer, as a number of its own; `missed`."""
        first = answer.strip().partition("\n")[0]
        if first.strip(" \t.,:;!\"'`*") == self.number:
            return EXACT
        return WITHIN if re.search(rf"(?<!\d){self.number}(?!\d)", answer) else MISSED


def needles(contexts: str, depths: str, seed: int = 0) -> list[Needle]:
    """A needle for every context and depth of two comma-separated lists. InputError for what is no such list."""
    sizes, places = _numbers("--needle-context", contexts, "1000,4000"), _numbers("--needle-depths", depths, "0,50,100")
    if min(sizes) < LEAST:
        raise InputError(f"--needle-context {contexts}: expected at least {LEAST} words")
    if max(places) > 100:
        raise InputError(f"--needle-depths {depths}: expected percentages, 0 (the beginning) to 100 (the end)")
    draw = random.Random(seed)
    numbers = draw.sample(range(1_000_000, 10_000_000), len(sizes) * len(places))
    return [Needle(size, place, str(numbers.pop())) for size in sizes for place in places]


def _numbers(option: str, text: str, example: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        raise InputError(f"{option} {text!r}: expected numbers such as {example}")
    found = [int(word) for word in words]
    if len(set(found)) < len(found):
        raise InputError(f"{option} {text}: expected each number once")
    return found
