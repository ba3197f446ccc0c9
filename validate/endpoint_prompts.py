"""The prompts that a served model and our engine are asked, read from a file: JSONL, or plain text, one a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from engines.tokenizer import Messages, checked_messages, conversation
from exporter.errors import InputError
from validate.needle import Needle

FIELDS = ("id", "prompt", "messages", "max_tokens")
EXPECTED = 'expected an object such as {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}'


@dataclass(frozen=True)
class Prompt:
    """One prompt: `messages` for chat completions, `prompt` for completions, the other None."""

    id: str
    messages: Messages | None
    prompt: str | None
    max_tokens: int
    needle: Needle | None = None

    @classmethod
    def text(cls, name: str, text: str, completions: bool, max_tokens: int, needle: Needle | None = None) -> Prompt:
        """A text as it is, or as a user's message."""
        return cls(name, None if completions else conversation([text]), text if completions else None, max_tokens,
                   needle)


def read_prompts(path: Path, completions: bool, max_tokens: int) -> list[Prompt]:
    """The prompts of a file, named by their `id`, else by their line's number. InputError with the line that is wrong.

    It is JSONL where its name ends in .jsonl, or its first line is a JSON object and its name does not end in .txt.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"--prompts {path}: cannot be read ({error.strerror}); expected JSONL, or text with one "
                         "prompt a line") from None
    except UnicodeDecodeError as error:
        raise InputError(f"--prompts {path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    kept = [(number, line.removesuffix("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not kept:
        raise InputError(f"--prompts {path}: is empty; expected at least one prompt")
    if path.suffix != ".jsonl" and (path.suffix == ".txt" or not kept[0][1].lstrip().startswith("{")):
        return [Prompt.text(str(number), line, completions, max_tokens) for number, line in kept]
    found = [_prompt(f"--prompts {path}, line {number}", number, line, completions, max_tokens)
             for number, line in kept]
    names = [prompt.id for prompt in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"--prompts {path}: id {twice!r} is there more than once; expected one prompt of each id")
    return found


def _prompt(where: str, number: int, line: str, completions: bool, max_tokens: int) -> Prompt:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON ({error}); {EXPECTED}") from None
    if not isinstance(data, dict) or ("prompt" in data) == ("messages" in data):
        raise InputError(f"{where}: {line[:60]!r}; {EXPECTED}, one of the two")
    if unknown := [name for name in data if name not in FIELDS]:
        raise InputError(f"{where}: unknown field {unknown[0]!r}; expected {', '.join(FIELDS)}")
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: an escape that is half a character; expected valid Unicode") from None
    most, name = data.get("max_tokens", max_tokens), data.get("id", number)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise InputError(f"{where}: max_tokens is {most!r}; expected a number of at least 1")
    if not isinstance(name, str | int):
        raise InputError(f"{where}: id is {name!r}; expected a text or a number")
    if "prompt" in data:
        if not isinstance(data["prompt"], str) or not data["prompt"]:
            raise InputError(f"{where}: prompt is {data['prompt']!r}; expected a text")
        return Prompt.text(str(name), data["prompt"], completions, most)
    if completions:
        raise InputError(f'{where}: messages are for chat; expected {{"prompt": "…"}} with --completions')
    return Prompt(str(name), checked_messages(data["messages"], where), None, most)
