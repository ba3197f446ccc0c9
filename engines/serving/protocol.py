"""The OpenAI API's requests, checked: what is asked for is done as asked or refused by name, never quietly left out.

Fields that nobody knows are ignored, as other servers of this API do; fields that would change the answer and are not
done here are refused.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from engines.sampling import Sampling

SEEDS = 1 << 63
CHAT_LOGPROBS, COMPLETION_LOGPROBS = 20, 5  # likeliest tokens at most, as the API has it
MOST_STOPS = 4
UNSAID_TOKENS = 16  # new tokens of a completion that says no number
# what changes an answer and is not done here -> what leaves it as it is
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None), "presence_penalty": (0, None), "logit_bias": ({}, None), "tools": ([], None),
    "tool_choice": ("none", "auto", None), "functions": ([], None), "function_call": ("none", "auto", None),
    "suffix": ("", None), "echo": (False, None), "audio": (None,), "modalities": (["text"], None),
    "response_format": ({"type": "text"}, None), "prediction": (None,), "repetition_penalty": (1, None)}
_OF_TOOLS = ("tool_calls", "function_call", "tool_call_id")  # what only messages of tools have


class StreamOptions(BaseModel):
    """What comes with a stream."""

    model_config = ConfigDict(strict=True)
    include_usage: bool = False


class Generation(BaseModel):
    """What both endpoints take. `top_k`, `min_p`, `ignore_eos` and `stop_token_ids` go beyond OpenAI's own API."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    n: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-SEEDS, lt=SEEDS)] = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        texts = [value] if isinstance(value, str) else value
        if texts is not None and not (isinstance(texts, list) and all(isinstance(t, str) and t for t in texts)
                                      and len(texts) <= MOST_STOPS):
            raise ValueError(f"expected a text or up to {MOST_STOPS} texts, none of them empty")
        return texts

    @model_validator(mode="after")
    def _supported(self) -> Generation:
        for name, value in (self.model_extra or {}).items():
            if name in _UNSUPPORTED and value not in _UNSUPPORTED[name]:
                raise ValueError(f"{name} is not supported here and would change the answer; leave it out")
        best = (self.model_extra or {}).get("best_of")
        if best is not None and best != self.choices:
            raise ValueError(f"best_of is {best!r:.20}, n is {self.choices}: this server draws the n answers that it "
                             "returns, not more to choose from; expected them equal; leave best_of out")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams; set stream to true, or leave them out")
        return self

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer and are not part of it."""
        return tuple(self.stop or ())

    @property
    def sampling(self) -> Sampling:
        """As the API has it, temperature 1 where none is given; without a seed every request draws its own."""
        seed = secrets.randbits(62) if self.seed is None else self.seed % SEEDS
        return Sampling(1.0 if self.temperature is None else self.temperature, max(self.top_k or 0, 0),
                        1.0 if self.top_p is None else self.top_p, self.min_p or 0.0, seed)


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int | None, Field(ge=0, le=COMPLETION_LOGPROBS)] = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> Any:
        def ids(part: Any) -> bool:
            return isinstance(part, list) and bool(part) and all(type(x) is int for x in part)

        many = isinstance(value, list) and bool(value) and (
            all(isinstance(part, str) for part in value) or all(map(ids, value)))
        if not (isinstance(value, str) or ids(value) or many):
            raise ValueError("expected a text, a list of texts, of token ids, or of lists of token ids")
        return value

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        whole = bool(self.prompt) and isinstance(self.prompt[0], int)
        return [self.prompt] if whole else list(self.prompt)  # type: ignore[list-item,arg-type]

    @property
    def new_tokens(self) -> int | None:
        """New tokens that were asked for; None where nothing was said."""
        return self.max_tokens

    @property
    def unsaid_tokens(self) -> int | None:
        """New tokens at most where nothing is said: 16, as the API has it, or what is left of the context."""
        return UNSAID_TOKENS

    @property
    def top(self) -> int | None:
        """Likeliest tokens with each one; None: no log-probabilities."""
        return self.logprobs


class Message(BaseModel):
    """One message; its content a text, or parts that are texts. Those of tools are refused, whatever a template would
    make of them: the tools themselves are not told to the model here."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: str | list[dict[str, Any]] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _parts(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, list):
            return value
        if not value or not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str)
                                for p in value):
            raise ValueError('expected a text, or parts such as {"type": "text", "text": "…"}; this model reads text')
        return "".join(part["text"] for part in value)

    @model_validator(mode="after")
    def _said(self) -> Message:
        found = [name for name in _OF_TOOLS if (self.model_extra or {}).get(name)]
        if found or self.role in ("tool", "function"):
            raise ValueError(f"{found[0] if found else f'the role {self.role}'} is not supported here: this server "
                             "calls no tools; leave the message out, or say in a text what the tool was asked and what "
                             "it answered")
        if self.content is None:
            raise ValueError(f"a message of the role {self.role[:40]!r} without content; expected a text, or parts "
                             'such as {"type": "text", "text": "…"}')
        return self


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=CHAT_LOGPROBS)] = None

    @model_validator(mode="after")
    def _together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs come with logprobs; set logprobs to true, or leave them out")
        return self

    @property
    def new_tokens(self) -> int | None:
        """New tokens that were asked for; None where nothing was said."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def unsaid_tokens(self) -> int | None:
        """None: where nothing is said, to the end of the context."""
        return None

    @property
    def top(self) -> int | None:
        """Likeliest tokens with each one; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """As a chat template takes it."""
        return [message.model_dump(exclude_none=True) for message in self.messages]


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None,
                 code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.body = status, error_body(message, kind, param, code)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
