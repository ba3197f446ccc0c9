"""A served model on a set of prompts, greedy: answers and times, long-context retrieval, and our engine beside it.

The server is asked first, then the engine, so that neither disturbs the other's times. A prompt that fails is recorded
and does not end the run, unless nothing was answered yet and the URL, the key or the model's name is why.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engines.generate import Generator
from engines.model_sessions import require_model
from engines.tokenizer import Tokenizer, open_tokenizer, stop_tokens
from exporter.console import finite
from exporter.errors import CheckError, InputError
from exporter.manifest import open_export
from exporter.output import write_file
from validate.endpoint_http import LIMITS, Endpoint, Limits, read_key
from validate.endpoint_prompts import Prompt, read_prompts
from validate.endpoint_stream import Answer, EndpointError
from validate.needle import EXACT, MISSED, needles

TIMES = ("first token: from sending the request (connecting included, retries not) to the first event with text; "
         "tokens/s: of the tokens after the first; medians of the repeats, of which all but the first may find the "
         "prompt in the server's cache")
Progress = Callable[..., None]


@dataclass(frozen=True)
class EndpointRequest:
    """What `python -m validate endpoint` was asked; see its --help."""

    base_url: str
    model: str
    prompts: Path | None = None
    completions: bool = False
    max_new_tokens: int = 64
    key_env: str | None = None
    needle: bool = False
    needle_context: str = "1000,4000,16000"
    needle_depths: str = "0,25,50,75,100"
    against: Path | None = None
    backend: str = "ort"
    tokenizer: Path | None = None
    repeat: int = 1
    concurrency: int = 1
    out: Path | None = None
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "repeat", "concurrency"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least 1")
        if self.prompts is None and not self.needle:
            raise InputError("nothing to ask; expected --prompts FILE, --needle, or both")
        if self.tokenizer is not None and self.against is None:
            raise InputError("--tokenizer is our engine's; expected --against DIR with it")
        if self.out is None:
            return
        if self.out.exists():
            raise InputError(f"--out {self.out}: exists; choose another file, or delete it")
        if not self.out.parent.is_dir() or not os.access(self.out.parent, os.W_OK):
            raise InputError(f"--out {self.out}: {self.out.parent} is not a folder that can be written; choose another")


@dataclass
class Outcome:
    """What became of one prompt at the server: a run each time it was asked, errors of those that failed."""

    prompt: Prompt
    runs: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ours: Ours | None = None
    ours_error: str | None = None

    @property
    def failed(self) -> bool:
        """Whether a run of it failed, at the server or in our engine."""
        return bool(self.errors) or self.ours_error is not None

    def to_dict(self) -> dict[str, Any]:
        """Medians of the runs, the first one's text, each run, and our engine's answer beside it."""
        first = self.runs[0] if self.runs else None
        needle, ours = self.prompt.needle, self.ours
        data: dict[str, Any] = {
            "id": self.prompt.id, "failed": self.failed, "errors": self.errors,
            "text": first and first.text, "finish_reason": first and first.finish_reason,
            "prompt_tokens": first and first.prompt_tokens, "tokens": first and first.tokens,
            "tokens_counted_by": first and first.counted_by,
            "seconds_to_first_token": median([run.seconds_to_first_token for run in self.runs]),
            "tokens_per_second": median([run.tokens_per_second for run in self.runs]),
            "repeats_equal": len({run.text for run in self.runs}) <= 1,
            "remarks": list(dict.fromkeys(remark for run in self.runs for remark in run.remarks)),
            "runs": [asdict(run) for run in self.runs], "ours": ours and asdict(ours), "ours_error": self.ours_error,
            "agreement": agreement(first.text, ours.text) if first and ours else None}
        if needle is not None:
            if first and first.finish_reason == "length" and self.prompt.messages and (
                    needle.verdict(first.text) == MISSED):
                data["remarks"].append(f"missed within {self.prompt.max_tokens} tokens; where the answer would have "
                                       "gone on to the number, raise --max-new-tokens")
            data["needle"] = {"context": needle.context, "depth": needle.depth, "number": needle.number,
                              "verdicts": [needle.verdict(run.text) for run in self.runs],
                              "ours": needle.verdict(ours.text) if ours else None}
        if first and ours and first.prompt_tokens not in (None, ours.prompt_tokens):
            data["remarks"].append(f"the server counts {first.prompt_tokens} tokens of prompt, our chat template and "
                                   f"tokenizer make {ours.prompt_tokens}: the two models do not read the same")
        return data


@dataclass(frozen=True)
class Ours:
    """Our engine's answer to the same prompt; seconds are of the runtime and the choice of tokens, medians."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    tokens: int
    seconds_to_first_token: float | None
    tokens_per_second: float | None


def compare_endpoint(request: EndpointRequest, progress: Progress = lambda message, share=None: None
                     ) -> dict[str, Any]:
    """Ask the server, then our engine, and report; the report is also written to `request.out`.

    InputError for a URL, key, model, prompts or export that cannot be used; a prompt that failed is in the report.
    """
    key = read_key(request.key_env, os.environ)
    prompts = _prompts(request)
    engine = None if request.against is None else _Engine(request, prompts)
    endpoint = Endpoint(request.base_url, request.model, completions=request.completions, key=key,
                        limits=request.limits)
    outcomes = [Outcome(prompt) for prompt in prompts]
    try:
        asyncio.run(_ask_all(endpoint, outcomes, request, progress))
    except InputError as error:
        raise InputError(endpoint.hide(str(error))) from None
    if engine is not None:
        engine.answer(outcomes, request, progress)
    data: dict[str, Any] = _hidden(_report(request, endpoint, outcomes), endpoint.hide)
    if request.out is not None:
        try:
            write_file(request.out, json.dumps(finite(data), indent=2, allow_nan=False).encode())
        except OSError as error:
            raise InputError(f"--out {request.out}: cannot be written ({error.strerror}); choose another file"
                             ) from None
    return data


def _prompts(request: EndpointRequest) -> list[Prompt]:
    found = [] if request.prompts is None else read_prompts(request.prompts, request.completions,
                                                            request.max_new_tokens)
    if request.needle:
        found += [Prompt.text(f"needle {n.context} words {n.depth} %", n.question + "\nAnswer:" * request.completions,
                              request.completions, request.max_new_tokens, n)
                  for n in needles(request.needle_context, request.needle_depths)]
    return found


async def _ask_all(endpoint: Endpoint, outcomes: Sequence[Outcome], request: EndpointRequest, progress: Progress
                   ) -> None:
    """Every prompt, then every prompt again; `concurrency` of them at a time."""
    turns = iter([outcome for _ in range(request.repeat) for outcome in outcomes])
    total, done = request.repeat * len(outcomes), 0

    async def work() -> None:
        nonlocal done
        for outcome in turns:
            prompt = outcome.prompt
            progress(f"{request.model}: {prompt.id}", done / total)
            try:
                outcome.runs.append(await endpoint.ask(prompt.messages, prompt.prompt, prompt.max_tokens))
            except EndpointError as error:
                if error.wrong and not any(o.runs for o in outcomes):
                    raise InputError(str(error)) from None
                outcome.errors.append(str(error))
            done += 1

    async with endpoint:
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(request.concurrency, total)):
                    workers.create_task(work())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # one sentence says it


class _Engine:
    """Our engine over an export, its prompts in tokens. InputError for an export or a tokenizer that cannot be used."""

    def __init__(self, request: EndpointRequest, prompts: Sequence[Prompt]) -> None:
        assert request.against is not None
        export = open_export(request.against)
        require_model(export)
        tokenizer = open_tokenizer(export, request.tokenizer, required=True)
        assert tokenizer is not None
        if not request.completions and not tokenizer.has_template:
            raise InputError(f"{tokenizer.folder}: no chat template; compare continuations of plain text with "
                             "--completions, or name a folder that has one with --tokenizer FOLDER")
        self._tokenizer: Tokenizer = tokenizer
        self._stops = stop_tokens(export, request.tokenizer, tokenizer)
        self._ids = [self._encoded(prompt) for prompt in prompts]
        self._generator = Generator(export, request.backend)

    def _encoded(self, prompt: Prompt) -> list[int]:
        try:
            if prompt.messages is not None:
                return self._tokenizer.encode_chat(prompt.messages)
            return self._tokenizer.encode(prompt.prompt or "")
        except InputError as error:
            raise InputError(f"prompt {prompt.id}: {error}") from None

    def answer(self, outcomes: Sequence[Outcome], request: EndpointRequest, progress: Progress) -> None:
        """Our answer into every outcome, or why there is none (a prompt longer than the export's context)."""
        with self._generator:
            for number, (outcome, ids) in enumerate(zip(outcomes, self._ids, strict=True)):
                progress(f"{request.against}: {outcome.prompt.id}", number / len(outcomes))
                try:
                    outcome.ours = self._one(ids, outcome.prompt.max_tokens, request.repeat)
                except (InputError, CheckError) as error:
                    outcome.ours_error = str(error)

    def _one(self, ids: list[int], max_new_tokens: int, repeat: int) -> Ours:
        first, rates, tokens, reason = list[float | None](), list[float | None](), list[int](), None
        for _ in range(repeat):
            steps = list(self._generator.generate([ids], max_new_tokens, stop_ids=self._stops))
            tokens, reason = [step.tokens[0] or 0 for step in steps], steps[-1].finished[0]
            figures = self._generator.statistics
            assert figures is not None
            first.append(figures.seconds_to_first_token)
            rates.append(figures.tokens_per_second)
        text = self._tokenizer.decode(tokens[:-1] if reason == "stop" else tokens)
        return Ours(text, reason, len(ids), len(tokens), median(first), median(rates))


def agreement(served: str, ours: str) -> dict[str, Any]:
    """How two texts agree: equal, or equal in their first `common_prefix` characters of so many each has."""
    differ = (i for i, (a, b) in enumerate(zip(served, ours, strict=False)) if a != b)
    return {"equal": served == ours, "common_prefix": next(differ, min(len(served), len(ours))),
            "served_characters": len(served), "our_characters": len(ours)}


def median(values: Sequence[float | None]) -> float | None:
    """The median of those that there are; None of none."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _report(request: EndpointRequest, endpoint: Endpoint, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    results = [outcome.to_dict() for outcome in outcomes]
    compared = [r["agreement"] for r in results if r["agreement"]]
    sought = [r["needle"] for r in results if "needle" in r]
    return {"url": endpoint.url, "model": request.model, "against": request.against and str(request.against),
            "backend": request.backend if request.against else None, "repeat": request.repeat,
            "concurrency": request.concurrency, "temperature": 0, "times": TIMES,
            "pass": not any(r["failed"] for r in results), "failed": sum(r["failed"] for r in results),
            "equal": sum(a["equal"] for a in compared) if request.against else None, "compared": len(compared),
            "needles_exact": sum(bool(n["verdicts"]) and set(n["verdicts"]) == {EXACT} for n in sought),
            "needles": len(sought), "prompts": results}


def _hidden(data: Any, hide: Callable[[str], str]) -> Any:
    """The report without the key, wherever a server may have written it."""
    if isinstance(data, str):
        return hide(data)
    if isinstance(data, dict):
        return {name: _hidden(value, hide) for name, value in data.items()}
    return [_hidden(value, hide) for value in data] if isinstance(data, list | tuple) else data
