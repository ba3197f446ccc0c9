"""A served model, on real sockets: answers, times, every way a server can misbehave, the key, our engine beside it."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from engines.generate import Generator
from engines.tokenizer import TextStream, Tokenizer, open_tokenizer, stop_tokens
from exporter import console
from exporter.errors import InputError
from exporter.export import ExportRequest, export
from exporter.manifest import open_export
from tests.model_checkpoints import tiny_checkpoint
from tests.openai_server import DONE, Behaviour, Exchange, Server, event, good, piece, replies, sends, usage
from tests.test_generate import small
from tests.test_tokenizer import PLAIN, write
from validate.__main__ import cli
from validate.endpoint import EndpointRequest, agreement, compare_endpoint
from validate.endpoint_http import Endpoint, Limits, read_key
from validate.endpoint_stream import Collector
from validate.needle import Needle, needles

REPOSITORY = Path(__file__).resolve().parent.parent
KEY = "sk-Zq7+w/9x'K2\\~\"secret"  # with all that a notation might escape
UPPER_BOUND = "an event holds several tokens, the first too perhaps: tokens/s is an upper bound"
QUICK = Limits(connect=0.5, first_token=1.5, token=0.4, retries=2, backoff=0.01, longest=1.0)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TEST_KEY", KEY)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("Why is the sky blue?\n")
    return path


def ask(server: Server | str, prompts: Path, **options: Any) -> dict[str, Any]:
    url = server if isinstance(server, str) else server.url
    return compare_endpoint(EndpointRequest(**{"base_url": url, "model": "served", "prompts": prompts, "limits": QUICK,
                                               "key_env": "TEST_KEY", **options}))


def one(behaviour: Behaviour, prompts: Path, **options: Any) -> dict[str, Any]:
    """The result of one prompt at a server that behaves so."""
    with Server(behaviour) as server:
        data = ask(server, prompts, **options)
    assert len(data["prompts"]) == 1
    result: dict[str, Any] = data["prompts"][0]
    assert data["pass"] is not result["failed"]
    return result


def many(tmp_path: Path, count: int) -> Path:
    path = tmp_path / "many.txt"
    path.write_text("".join(f"prompt {i}\n" for i in range(count)))
    return path


# --- Answers and their times ------------------------------------------------------------------------------------------


def test_what_is_asked_and_what_comes_back(prompts: Path) -> None:
    with Server(good("The ", "sky", ".", tokens=4)) as server:
        data = ask(server, prompts, max_new_tokens=7)
    exchange = server.exchanges[0]
    assert exchange.path == "/v1/chat/completions"
    assert exchange.headers["Authorization"] == f"Bearer {KEY}"
    assert exchange.body == {"model": "served", "messages": [{"role": "user", "content": "Why is the sky blue?"}],
                             "temperature": 0, "stream": True, "max_tokens": 7,
                             "stream_options": {"include_usage": True}}
    result = data["prompts"][0]
    assert (data["url"], data["pass"], data["failed"]) == (f"{server.url}/chat/completions", True, 0)
    assert (result["id"], result["text"], result["finish_reason"]) == ("1", "The sky.", "stop")
    assert (result["tokens"], result["tokens_counted_by"], result["prompt_tokens"]) == (4, "usage", 5)
    assert result["remarks"] == result["errors"] == []
    assert result["agreement"] is None


def test_completions(prompts: Path) -> None:
    def chunk(text: str, finish: str | None = None) -> bytes:
        return event({"choices": [{"text": text, "finish_reason": finish}]})

    with Server(sends(chunk(" is"), chunk(" blue"), chunk("", "length"), usage(2), DONE)) as server:
        result = ask(server, prompts, completions=True, key_env=None)["prompts"][0]
    exchange = server.exchanges[0]
    assert (exchange.path, exchange.body["prompt"]) == ("/v1/completions", "Why is the sky blue?")
    assert "messages" not in exchange.body
    assert "Authorization" not in exchange.headers
    assert (result["text"], result["finish_reason"], result["tokens"]) == (" is blue", "length", 2)


def test_times_are_those_of_the_sockets(prompts: Path) -> None:
    pauses = [piece(), 0.3, piece("a"), 0.1, piece("b"), 0.1, piece("c"), piece("", "stop")]
    counted = one(sends(*pauses, usage(9), DONE), prompts)
    assert 0.3 <= counted["seconds_to_first_token"] < 0.8
    assert 15 < counted["tokens_per_second"] < 60  # eight tokens in 0.2 s
    assert counted["remarks"] == [UPPER_BOUND]
    chunks = one(sends(*pauses, DONE), prompts)
    assert (chunks["tokens"], chunks["tokens_counted_by"]) == (3, "chunks")
    assert 4 < chunks["tokens_per_second"] < 15  # two in 0.2 s
    assert chunks["remarks"] == ["no usage came: tokens are events with text, and one event may hold several tokens"]
    at_once = one(sends(piece("all of it", "stop"), usage(30), DONE), prompts)
    assert at_once["tokens_per_second"] is None
    assert 0 < at_once["seconds_to_first_token"] < 0.3


def test_figures_to_the_millisecond() -> None:
    """The same arithmetic on a clock that stands still: request at 10 s, text at 10.5, 10.7 and 10.9, the end at 11."""
    for counted, tokens, rate in ((None, 3, 2 / 0.4), (5, 5, 4 / 0.5), (1, 1, None), (0, 0, None)):
        times = iter((10.0, 10.5, 10.7, 10.9, 11.0))
        collector = Collector("POST", False, str, lambda times=times: next(times))
        counts = [] if counted is None else [usage(counted)]
        for packet in (piece(), piece("a"), piece("b"), piece("c"), piece("", "stop"), *counts, DONE):
            collector.take(packet.decode().removeprefix("data: "))
        found = collector.answer()
        assert (found.tokens, found.seconds_to_first_token, found.seconds) == (tokens, 0.5, 1.0)
        assert found.tokens_per_second == (None if rate is None else pytest.approx(rate))


def test_repeats_are_medians_over_one_connection(prompts: Path) -> None:
    delays = iter((0.02, 0.8, 0.4))

    def slower(exchange: Exchange) -> None:
        exchange.stream([next(delays), piece("x"), piece("y", "stop"), usage(2), DONE])

    with Server(slower) as server:
        result = ask(server, prompts, repeat=3)["prompts"][0]
    first = [run["seconds_to_first_token"] for run in result["runs"]]
    assert result["seconds_to_first_token"] == statistics.median(first) == first[2]
    assert 0.4 <= first[2] < 0.8 <= first[1]
    assert result["repeats_equal"]
    assert (len(server.exchanges), server.connections) == (3, 1)
    with Server(good("a"), good("b")) as server:
        assert not ask(server, prompts, repeat=2)["prompts"][0]["repeats_equal"]


def test_concurrency(tmp_path: Path) -> None:
    under_way, most, lock = 0, 0, threading.Lock()

    def slow(exchange: Exchange) -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        text = exchange.body["messages"][0]["content"]
        exchange.stream(packets(f"to {text}"))

    def packets(text: str) -> Iterator[bytes | float]:
        nonlocal under_way
        yield 0.1
        yield piece(text, "stop")
        with lock:
            under_way -= 1
        yield DONE  # after the count, so that no client is ahead of it

    path = many(tmp_path, 9)
    for concurrency in (1, 3):
        most = 0
        with Server(slow) as server:
            data = ask(server, path, concurrency=concurrency)
        assert [r["text"] for r in data["prompts"]] == [f"to prompt {i}" for i in range(9)]
        assert most == server.connections == concurrency


def test_reasoning_is_kept_apart(prompts: Path) -> None:
    def thought(name: str) -> bytes:
        return event({"choices": [{"delta": {name: "hm"}}]})

    result = one(sends(0.05, thought("reasoning_content"), 0.3, thought("reasoning"), piece("yes", "stop"), usage(3),
                       DONE), prompts)
    assert (result["text"], result["runs"][0]["reasoning"]) == ("yes", "hmhm")
    assert 0.05 <= result["seconds_to_first_token"] < 0.3  # a token is a token
    assert result["remarks"] == ["the server took reasoning out of the answer; texts are compared without it"]


def test_fields_that_a_server_refuses_are_left_out(prompts: Path) -> None:
    def strict(exchange: Exchange) -> None:
        if "stream_options" in exchange.body:
            exchange.reply(400, {"error": {"message": "Unrecognized request argument supplied: stream_options"}})
        elif "max_tokens" in exchange.body:
            exchange.reply(400, {"error": {"message": "Use 'max_completion_tokens' instead."}})
        else:
            exchange.stream([piece("good", "stop"), DONE])

    with Server(strict) as server:
        result = ask(server, prompts, repeat=2)["prompts"][0]
    assert result["text"] == "good"
    assert len(server.exchanges) == 4  # the second time it is known
    assert server.exchanges[-1].body["max_completion_tokens"] == 64
    always = replies(400, {"error": {"message": "stream_options: whatever is sent"}})
    assert "answered 400 with 'stream_options: whatever is sent'" in one(always, prompts)["errors"][0]


# --- Streams in every shape -------------------------------------------------------------------------------------------

TEXTS = ["Über ", "注意力", "机制 🙂", "\u2028line\u2029", "\x85 next", "\r\nend"]
WHOLE = [piece(), *map(piece, TEXTS), piece("", "stop"), usage(6), DONE]
BYTES = b"".join(WHOLE)
SHAPES: dict[str, list[bytes | float]] = {
    "an event a packet": list(WHOLE),
    "all in one packet": [BYTES],
    "a byte a packet": [bytes([byte]) for byte in BYTES],
    "CRLF": [BYTES.replace(b"\n", b"\r\n")],
    "CRLF split between": [part for p in WHOLE for part in (p.replace(b"\n", b"\r\n")[:-1], 0.005, b"\n")],
    "CR": [BYTES.replace(b"\n", b"\r")],
    "comments": [b": keep-alive\n\n" + p + b":\n\n" for p in WHOLE],
    "no space, other fields": [BYTES.replace(b"data: ", b"event: message\nid: 7\nretry: 10\ndata:")],
    "data over two lines": [BYTES.replace(b', "finish_reason"', b',\ndata: "finish_reason"')],
    "empty events": [b"data:\n\n" + p for p in WHOLE],
    "escaped": [json.dumps(json.loads(p[6:])).join(("data: ", "\n\n")).encode() for p in WHOLE[:-1]] + [DONE],
    "usage null, then counted": [p.replace(b'{"choices": [{', b'{"usage": null, "choices": [{') for p in WHOLE],
    "choices empty at first": [event({"choices": [], "prompt_filter_results": []}), *WHOLE],
    "more after the end": [*WHOLE, piece("never")],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunked", [True, False])
def test_shapes_of_a_stream(prompts: Path, shape: str, chunked: bool) -> None:
    result = one(sends(*SHAPES[shape], chunked=chunked), prompts)
    assert result["text"] == "".join(TEXTS)
    assert (result["finish_reason"], result["tokens"], result["errors"]) == ("stop", 6, [])
    assert result["remarks"] == []


def test_any_split_into_packets(prompts: Path) -> None:
    draw = random.Random(0)
    for _ in range(20):
        cuts = sorted(draw.sample(range(1, len(BYTES)), draw.randint(1, 60)))
        packets = [BYTES[a:b] for a, b in zip([0, *cuts], [*cuts, len(BYTES)], strict=True)]
        assert one(sends(*packets), prompts)["text"] == "".join(TEXTS)


def test_half_characters_are_mended(prompts: Path) -> None:
    halves = [b'data: {"choices": [{"delta": {"content": "\\ud83d"}}]}\n\n',
              b'data: {"choices": [{"delta": {"content": "\\ude42 \\udc00"}, "finish_reason": "stop"}]}\n\n']
    assert one(sends(*halves, DONE), prompts)["text"] == "🙂 \ufffd"


def test_a_connection_that_stays_open_after_the_end(prompts: Path) -> None:
    begin = time.perf_counter()
    assert one(sends(piece("x", "stop"), DONE, 30.0), prompts, limits=Limits(token=20))["text"] == "x"
    assert time.perf_counter() - begin < 5


def test_an_answer_may_take_longer_than_its_first_token(prompts: Path) -> None:
    slowly: list[bytes | float] = [part for _ in range(8) for part in (0.2, piece("x"))]
    result = one(sends(*slowly, piece("", "stop"), DONE), prompts, limits=Limits(first_token=1, token=1))
    assert result["text"] == "x" * 8
    begin = time.perf_counter()
    assert one(sends(*HALF, 30.0), prompts, limits=Limits(first_token=20, token=0.2))["failed"]
    assert time.perf_counter() - begin < 5


# --- What goes wrong, each in its own words ---------------------------------------------------------------------------

HALF = [piece(), piece("The sky")]
BAD: dict[str, tuple[Behaviour, str]] = {
    "malformed JSON": (sends(*HALF, b'data: {"choices": [{"delta"\n\n', DONE),
                       r"a malformed stream: event 3 is .*\"delta\".*, expected JSON; see whether --base-url"),
    "no object": (sends(event([1]), DONE), r"event 1 is '\[1\]', expected a JSON object"),
    "choices no list": (sends(event({"choices": {}}), DONE), "expected choices, a list of objects"),
    "text no string": (sends(event({"choices": [{"delta": {"content": 5}}]}), DONE), "expected text that is a string"),
    "delta no object": (sends(event({"choices": [{"delta": [5]}]}), DONE), "expected a delta that is an object"),
    "cut off": (sends(*HALF, cut=True), r"cut off after 7 characters: the connection broke \(RemoteProtocolError.*\); "
                                        "see the server's log, and time limits of proxies"),
    "ended early": (sends(*HALF, chunked=False), r"cut off after 7 characters: the stream ended without finish_reason "
                                                 r"and without \[DONE\]"),
    "an error inside": (sends(*HALF, event({"error": {"message": "out of memory", "code": 500}})),
                        "after 7 characters the server broke off with an error: 'out of memory'"),
    "no events": (sends(b": nothing\n\n"), "a stream without any event"),
    "done alone": (sends(DONE), "a stream without any event"),
    "choices empty": (sends(event({"choices": []}), event({"choices": []}), DONE),
                      "2 events, each with an empty choices list; expected one choice"),
    "an event without end": (sends(b"data: " + b"x" * 1_100_000, b"\n\n"), "malformed stream: .*exceeded"),
    "no stream": (replies(200, {"choices": [{"message": {"content": "x"}}]}), "one JSON object in place of a stream"),
    "no stream, no choices": (replies(200, {"choices": []}), "one JSON object with an empty choices list"),
    "plain text": (replies(200, "hello", "text/plain"), "content type 'text/plain' with 'hello'; expected text/event"),
    "error with 200": (replies(200, {"error": "overloaded"}), "content type 'application/json' with 'overloaded'"),
    "too long": (replies(400, {"error": {"message": "maximum context length is 8"}}),
                 "answered 400 with 'maximum context length is 8'; .*shorten the prompt"),
    "an error inside, as vLLM wrote it": (sends(*HALF, event({"object": "error", "message": "out of memory"})),
                                          "the server broke off with an error: 'out of memory'"),
    "detail": (replies(422, {"detail": [{"loc": ["body"], "msg": "bad"}]}), r"answered 422 with .*\"msg\": \"bad\""),
    "500 forever": (replies(500, "boom", "text/plain"), r"answered 500 with 'boom'; see the server's log "
                                                        r"\(asked 3 times\)"),
    "a proxy's page": (replies(502, "<html>Bad Gateway</html>", "text/html"), "answered 502 with an HTML page"),
    "429 forever": (replies(429, {"error": {"message": "slow down"}}), r"429 with 'slow down'; lower --concurrency.* "
                                                                       r"\(asked 3 times\)"),
    "429 for an hour": (replies(429, {"message": "quota"}, Retry_After="3600"),
                        "'quota'.*it asks to wait 3600 s, and 1 s at most are waited here"),
    "slow first token": (sends(piece(), 30.0, piece("x")), "no token within 1.5 s; raise --first-token-timeout"),
    "keep-alives alone": (sends(piece(), *[b": ping\n\n", 0.05] * 60, piece("x")), "no token within 1.5 s"),
    "slow between tokens": (sends(*HALF, 30.0), "after 7 characters nothing more came for 0.4 s; raise "
                                                "--token-timeout"),
    "keep-alives between": (sends(*HALF, *[b": ping\n\n", 0.05] * 60), "nothing more came for 0.4 s"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_servers(prompts: Path, case: str) -> None:
    behaviour, said = BAD[case]
    begin = time.perf_counter()
    result = one(behaviour, prompts)
    assert time.perf_counter() - begin < 4
    assert result["failed"]
    assert re.search(said, result["errors"][0]), result["errors"][0]
    assert re.match(r"POST http://127\.0\.0\.1:\d+/v1/chat/completions: ", result["errors"][0])
    assert (result["text"], result["runs"], result["tokens_per_second"]) == (None, [], None)


def test_accepted_with_a_remark(prompts: Path) -> None:
    without = one(sends(piece("x", "stop"), usage(1)), prompts)
    assert (without["failed"], without["text"]) == (False, "x")
    assert without["remarks"] == ["the stream ended without [DONE]; finish_reason had come, so the answer is taken as "
                                  "whole"]
    assert one(sends(piece("x"), usage(1), DONE), prompts)["remarks"] == ["no finish_reason came"]
    empty = one(sends(piece("", "stop"), usage(1), DONE), prompts)
    assert (empty["text"], empty["seconds_to_first_token"], empty["remarks"]) == ("", None, ["the answer is empty"])


WRONG: dict[str, tuple[Behaviour, str]] = {
    "key": (replies(401, {"error": {"message": f"Incorrect API key provided: {KEY}."}}),
            r"answered 401 with .Incorrect API key provided: \*\*\*\..; check the key in the variable that --key-env"),
    "forbidden": (replies(403, {"detail": "no"}), "answered 403 with 'no'"),
    "path or model": (replies(404, {"error": {"message": "The model `served` does not exist"}}),
                      "404 with 'The model `served` does not exist'; check --base-url .* and --model served"),
    "method": (replies(405, ""), "405 with nothing; check --base-url"),
    "a web site": (replies(200, "<!doctype html><title>Log in</title>", "text/html"), "an HTML page, expected"),
    "a page without a type": (replies(200, "\n <html>", "application/octet-stream"), "an HTML page, expected"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_no_request_can_mend_ends_the_run(tmp_path: Path, case: str) -> None:
    behaviour, said = WRONG[case]
    for concurrency in (1, 4):
        with Server(behaviour) as server, pytest.raises(InputError, match=said) as stopped:
            ask(server, many(tmp_path, 20), concurrency=concurrency)
        assert len(server.exchanges) <= concurrency
        assert KEY not in str(stopped.value)


def test_after_an_answer_the_others_are_still_asked(tmp_path: Path) -> None:
    with Server(good("a"), replies(401, "x", "text/plain"), replies(404, {}), good("b")) as server:
        data = ask(server, many(tmp_path, 4))
    assert [r["text"] for r in data["prompts"]] == ["a", None, None, "b"]
    assert (data["failed"], data["pass"]) == (2, False)


def test_no_key_is_asked_for_by_name(prompts: Path) -> None:
    with Server(replies(401, "", "text/plain")) as server, pytest.raises(
            InputError, match="401 with nothing; name the variable that holds a key with --key-env"):
        ask(server, prompts, key_env=None)


def test_no_server_at_all(prompts: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = r"no answer \(ConnectError.*\); expected a server there; check --base-url and that it runs \(asked 3 times\)"
    with pytest.raises(InputError, match=said):
        ask(f"http://127.0.0.1:{port}", prompts)
    with pytest.raises(InputError, match="no answer"):
        ask("http://no-such-host.invalid/v1", prompts)
    with Server(Exchange.hang_up) as server, pytest.raises(InputError, match=r"RemoteProtocolError.*asked 3 times"):
        ask(server, prompts)


# --- Retries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [replies(429, {}), replies(503, "x", "text/plain"), replies(500, {}),
                                     replies(429, {}, Retry_After="0"), Exchange.hang_up])
def test_a_passing_failure_is_asked_again(prompts: Path, failure: Behaviour) -> None:
    with Server(failure, failure, good("x", tokens=1)) as server:
        result = ask(server, prompts)["prompts"][0]
    assert (result["text"], result["runs"][0]["attempts"], len(server.exchanges)) == ("x", 3, 3)
    assert server.exchanges[0].body == server.exchanges[2].body


@pytest.mark.parametrize("date", [False, True])
def test_retry_after_is_followed(prompts: Path, date: bool) -> None:
    when = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True) if date else "1"
    with Server(replies(429, {}, Retry_After=when), good("x")) as server:
        begin = time.perf_counter()
        result = ask(server, prompts, limits=Limits(0.5, 1.5, 0.4, 1, 0.01, 3.0))["prompts"][0]
    assert result["text"] == "x"
    assert time.perf_counter() - begin > 0.9
    assert result["seconds_to_first_token"] < 0.9  # of the request that was answered


def test_waiting_grows_is_spread_and_bounded() -> None:
    limits = Limits(backoff=0.5, longest=10)
    for tries, most in ((0, 0.5), (1, 1.0), (3, 4.0), (9, 10.0)):
        waits = [limits.wait(tries, None) for _ in range(200)]
        assert most / 2 <= min(waits) < most * 0.6
        assert most * 0.9 < max(waits) <= most
    assert all(7.0 <= limits.wait(9, 7.0) <= 7.25 for _ in range(50))


@pytest.mark.parametrize("nonsense", ["soon", "-5", "", "Mon, 99 Foo 2026"])
def test_a_retry_after_that_says_nothing(prompts: Path, nonsense: str) -> None:
    with Server(replies(503, {}, Retry_After=nonsense), good("x")) as server:
        assert ask(server, prompts)["prompts"][0]["text"] == "x"


# --- The key ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_carry_the_key_nowhere(prompts: Path, status: int) -> None:
    with Server(good("stolen")) as other:
        with Server(replies(status, "", Location=f"{other.url}/chat/completions?k={KEY}")) as server, pytest.raises(
                InputError, match=rf"answered {status}, a redirect to 'http://127.*k=\*\*\*'; redirects are not "):
            ask(server, prompts)
        assert other.exchanges == []
        assert other.connections == 0


def test_the_key_is_hidden_before_a_quotation_is_cut(prompts: Path) -> None:
    for pad in range(180, 201):
        text = one(replies(500, "x" * pad + KEY, "text/plain"), prompts, limits=Limits(retries=0))["errors"][0]
        assert KEY[:4] not in text
    for form in (KEY, json.dumps(KEY), repr(KEY), quote(KEY, safe="")):
        for behaviour in (replies(500, form, "text/plain"), replies(200, "", f"text/{form}"),
                          sends(*HALF, f"data: {form}\n\n".encode()), replies(400, {"error": {"type": form}})):
            text = one(behaviour, prompts, limits=Limits(retries=0))["errors"][0]
            assert "***" in text
            assert "zq7" not in text.lower()


@pytest.mark.parametrize(("value", "said"), [
    ("", "no such environment variable, or it is empty"), ("two words", "holds a space, a line break or a character"),
    ("a\nb", "holds a space"), ("schlüssel", "outside ASCII")])
def test_keys_that_no_header_holds(value: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as stopped:
        read_key("NAME", {"NAME": value})
    assert not value or value not in str(stopped.value)
    with pytest.raises(InputError, match="no such environment variable"):
        read_key("OTHER", {})
    assert read_key("NAME", {"NAME": f" {KEY}\n"}) == KEY
    assert read_key(None, {"OPENAI_API_KEY": KEY}) is None


@pytest.mark.parametrize(("url", "said"), [
    ("localhost:8000", "expected http:// or https://"), ("ftp://h/v1", "expected http"), ("http://", "expected http"),
    ("http://me:pw-7@h/v1", "holds a user name"), ("http://h/v1?key=pw-7", "holds a user name, a query"),
    ("http://h/v1/chat/completions/", "expected what stands before"), ("http://h:99999/v1", "expected http"),
    ("http://h:port/v1?key=pw-7", "not a URL")])
def test_urls(url: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as stopped:
        Endpoint(url, "m")
    assert "pw-7" not in str(stopped.value)
    assert Endpoint("https://h/v1/", "m").url == "https://h/v1/chat/completions"


# --- The command ------------------------------------------------------------------------------------------------------


class Cli:
    """`python -m validate endpoint` in this process; the key is searched for in all that any run printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                 caplog: pytest.LogCaptureFixture) -> None:
        self.monkeypatch, self.capsys, self.caplog = monkeypatch, capsys, caplog
        caplog.set_level(logging.DEBUG)  # of every library

    def run(self, server: Server | str, *words: str | Path) -> tuple[int, str, str]:
        url = server if isinstance(server, str) else server.url
        argv = ["endpoint", "--base-url", url, "--model", "served", "--key-env", "TEST_KEY", "--retries", "0",
                "--first-token-timeout", "1", "--token-timeout", "0.4", *map(str, words)]
        self.monkeypatch.setattr(sys, "argv", ["validate", *argv])
        with pytest.raises(SystemExit) as stopped:
            console.main(cli, "python -m validate")
        captured = self.capsys.readouterr()
        for form in (KEY, json.dumps(KEY)[1:-1], repr(KEY)[1:-1], quote(KEY, safe="")):
            assert form not in captured.out + captured.err
            assert form not in self.caplog.text
        return int(stopped.value.code or 0), captured.out, captured.err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
            ) -> Cli:
    return Cli(monkeypatch, capsys, caplog)


def test_results_for_people_and_programs(command: Cli, tmp_path: Path) -> None:
    path, out = many(tmp_path, 3), tmp_path / "results.json"
    behaviours = (good("fi\nne \x1b[31m[bold]", f" {KEY[:5]}", KEY[5:], tokens=3), replies(500, {"error": KEY}),
                  sends(*HALF, event({"error": {"message": f"key {KEY}"}})))
    with Server(*behaviours) as server:
        code, printed, err = command.run(server, "--prompts", path)
    assert (code, err) == (1, "error: 2 of 3 prompts failed\n")
    assert r"fi\nne \x1b[31m[bold] ***" in printed
    assert "FAILED" in printed
    assert "2: POST http://127.0.0.1" in printed
    assert "\x1b[31m" not in printed
    with Server(*behaviours) as server:
        code, printed, err = command.run(server, "--prompts", path, "--json", "--out", out)
    assert (code, err, printed.count("\n")) == (1, "", 1)
    data = json.loads(printed)
    assert json.loads(out.read_text()) == data
    assert KEY not in out.read_text()
    assert [r["failed"] for r in data["prompts"]] == [False, True, True]
    assert data["prompts"][0]["text"].endswith("[bold] ***")
    assert "'***'" in data["prompts"][1]["errors"][0]
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []
    before = out.read_text()
    code, printed, _ = command.run("http://127.0.0.1:9/v1", "--prompts", path, "--json", "--out", out)
    assert (code, json.loads(printed)["error"]) == (2, f"--out {out}: exists; choose another file, or delete it")
    assert out.read_text() == before


def test_a_wrong_url_or_key_is_exit_2(command: Cli, prompts: Path, tmp_path: Path) -> None:
    for behaviour in (WRONG["key"][0], WRONG["a web site"][0], WRONG["path or model"][0], Exchange.hang_up):
        with Server(behaviour) as server:
            code, printed, err = command.run(server, "--prompts", prompts, "--out", tmp_path / "never.json")
            assert (code, printed, err.count("\n")) == (2, "", 1)
            code, printed, _ = command.run(server, "--prompts", prompts, "--json")
            assert (code, list(json.loads(printed))) == (2, ["error"])
    assert not (tmp_path / "never.json").exists()


@pytest.mark.parametrize(("words", "said"), [
    ([], "nothing to ask; expected --prompts FILE, --needle, or both"),
    (["--prompts", "no.txt"], "--prompts no.txt: cannot be read (No such file or directory)"),
    (["--needle", "--repeat", "0"], "--repeat 0: expected at least 1"),
    (["--needle", "--concurrency", "-1"], "--concurrency -1: expected"),
    (["--needle", "--max-new-tokens", "0"], "--max-new-tokens 0: expected"),
    (["--needle", "--token-timeout", "0"], "--token-timeout 0.0: expected seconds above 0"),
    (["--needle", "--connect-timeout", "nan"], "--connect-timeout nan: expected seconds"),
    (["--needle", "--retries", "-1"], "--retries -1: expected 0 or more"),
    (["--needle", "--needle-context", "10"], "expected at least 50 words"),
    (["--needle", "--needle-context", "a"], "--needle-context 'a': expected numbers such as 1000,4000"),
    (["--needle", "--needle-depths", "50,101"], "expected percentages"),
    (["--needle", "--needle-depths", "5,5"], "expected each number once"),
    (["--needle", "--tokenizer", "x"], "--tokenizer is our engine's; expected --against DIR"),
    (["--needle", "--against", "nowhere"], "nowhere: no manifest.json"),
    (["--needle", "--out", "/no/such/folder/x.json"], "/no/such/folder is not a folder that can be written"),
    (["--needle", "--key-env", "NOT_SET_ANYWHERE"], "--key-env NOT_SET_ANYWHERE: no such environment variable")])
def test_bad_options(command: Cli, words: list[str], said: str) -> None:
    with Server(good("x")) as server:
        code, _, err = command.run(server, *words)
        assert code == 2
        assert said in err
        assert server.exchanges == []  # nothing was asked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(prompts: Path, number: signal.Signals) -> None:
    with Server(sends(*HALF, 60.0)) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "validate", "endpoint", "--base-url", server.url, "--model", "m", "--prompts",
             str(prompts), "--json"], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None)
        while process.poll() is None and not server.exchanges:
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err.strip()) == (130, "error: interrupted; nothing was left behind")
    assert json.loads(out) == {"error": "interrupted; nothing was left behind"}


# --- Prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "system", "content": "brief"}, {"role": "user", "content": "hi \u2028"}]
    lines = [{"prompt": "a", "id": "first", "max_tokens": 3}, {"messages": chat}, {"prompt": "b", "id": 7}]
    path.write_text("\ufeff" + "\r\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n")
    with Server(good("x")) as server:
        data = ask(server, path)
        assert [r["id"] for r in data["prompts"]] == ["first", "3", "7"]
        asked = [(e.body["messages"], e.body["max_tokens"]) for e in server.exchanges]
        assert asked == [([{"role": "user", "content": "a"}], 3), (chat, 64), ([{"role": "user", "content": "b"}], 64)]
        plain = tmp_path / "plain.txt"
        plain.write_text('{"not": JSON}\n  indented \r\n\n')
        ask(server, plain)
        assert [e.body["messages"][0]["content"] for e in server.exchanges[3:]] == ['{"not": JSON}', "  indented "]


@pytest.mark.parametrize(("text", "said"), [
    ("", "is empty; expected at least one prompt"), ("{", "line 1: not valid JSON"), ("\n[1]", "line 2: '[1]'; exp"),
    ('{"text": "x"}', "expected an object such as"), ('{"prompt": "x", "messages": []}', "one of the two"),
    ('{"prompt": 5}', "prompt is 5; expected a text"), ('{"prompt": "x", "n": 2}', "unknown field 'n'"),
    ('{"prompt": "x", "max_tokens": 0}', "max_tokens is 0; expected a number of at least 1"),
    ('{"prompt": "x", "max_tokens": true}', "max_tokens is True"), ('{"prompt": "x", "id": []}', "id is []"),
    ('{"prompt": "x", "id": 1}\n{"prompt": "y", "id": "1"}', "id '1' is there more than once"),
    ('{"messages": []}', "expected a list of at least one message"), ('{"messages": [{"role": 1}]}', "message 0 is"),
    ('{"prompt": "\\ud83d"}', "half a character"), ("\xff", "not UTF-8 text")])
def test_bad_prompts(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError) as stopped:
        ask("http://127.0.0.1:9/v1", path)
    assert said in str(stopped.value)
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}')
    with pytest.raises(InputError, match=r"messages are for chat; expected .* with --completions"):
        ask("http://127.0.0.1:9/v1", path, completions=True)


# --- Needles ----------------------------------------------------------------------------------------------------------


def test_where_a_needle_lies() -> None:
    for needle in needles("50,400,3000", "0,10,50,100"):
        text = needle.text
        assert text == needle.text
        assert len(text.split()) == needle.context
        assert text.count(needle.number) == 1
        assert re.sub(needle.number, "", text).isascii()
        assert not re.search(r"\d", text.replace(needle.number, ""))
        share = text.index("The secret") / len(text)
        assert share == pytest.approx(needle.depth / 100, abs=0.03 if needle.context > 50 else 0.2)
        assert needle.question.startswith(text)
    found = needles("50,400,3000", "0,10,50,100")
    assert len({needle.number for needle in found}) == 12
    assert found == needles("50,400,3000", "0,10,50,100") != needles("50,400,3000", "0,10,50,100", seed=1)


@pytest.mark.parametrize(("answer", "verdict"), [
    ("1234567", "exact"), (" 1234567.\n", "exact"), ("**1234567**", "exact"), ("1234567\n\nQuestion: more", "exact"),
    ("The number is 1234567.", "within"), ("It is:\n1234567", "within"), ("12345678", "missed"), ("01234567", "missed"),
    ("1,234,567", "missed"), ("", "missed"), ("1234568", "missed")])
def test_verdicts(answer: str, verdict: str) -> None:
    assert Needle(50, 0, "1234567").verdict(answer) == verdict


@pytest.mark.parametrize("completions", [False, True])
def test_needles_by_context_and_depth(command: Cli, completions: bool) -> None:
    def reader(exchange: Exchange) -> None:
        """Reads the first 300 words, and has doubts about the middle."""
        body = exchange.body
        text = body["prompt"] if completions else body["messages"][0]["content"]
        words = text.split()
        place = next(i for i, word in enumerate(words) if re.fullmatch(r"\d{7}\.", word))
        said = "I do not know" if place > 300 else words[place] if place < 30 else f"Perhaps {words[place]}"
        part = {"text": said} if completions else {"delta": {"content": said}}
        exchange.stream([event({"choices": [{**part, "finish_reason": "stop"}]}), usage(4, len(words)), DONE])

    words = ["--needle", "--needle-context", "100,1000", "--needle-depths", "0,50,100",
             *(["--completions"] if completions else [])]
    with Server(reader) as server:
        code, printed, _ = command.run(server, *words, "--json")
        assert code == 0
        data = json.loads(printed)
        code, printed, _ = command.run(server, *words)
    verdicts = {(r["needle"]["context"], r["needle"]["depth"]): r["needle"]["verdicts"] for r in data["prompts"]}
    assert verdicts == {(100, 0): ["exact"], (100, 50): ["within"], (100, 100): ["within"],
                        (1000, 0): ["exact"], (1000, 50): ["missed"], (1000, 100): ["missed"]}
    assert (data["needles"], data["needles_exact"]) == (6, 2)
    table = [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines()]
    extra = 15 if completions else 14
    assert ["100", str(100 + extra), "exact", "within", "within"] in table
    assert ["1000", str(1000 + extra), "exact", "missed", "missed"] in table


# --- Our engine beside the server -------------------------------------------------------------------------------------


def test_agreement() -> None:
    assert agreement("", "") == {"equal": True, "common_prefix": 0, "served_characters": 0, "our_characters": 0}
    assert agreement("abc", "abd")["common_prefix"] == agreement("ab", "abd")["common_prefix"] == 2
    assert not agreement("ab", "abd")["equal"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's export with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("endpoint")
    checkpoint = write(tiny_checkpoint(folder / "checkpoint", "v3-dense"), small(), chat_template=PLAIN)
    export(ExportRequest(str(checkpoint), folder / "model", "model", max_context=400))
    return folder / "model"


class Served:
    """The same engine behind a server; `alter` changes the pieces of its text."""

    def __init__(self, folder: Path) -> None:
        made = open_export(folder)
        tokenizer = open_tokenizer(made, None, required=True)
        assert tokenizer is not None
        self.tokenizer: Tokenizer = tokenizer
        self.stops, self.generator = stop_tokens(made, None, tokenizer), Generator(made, threads=1)
        self.lock, self.alter, self.extra = threading.Lock(), str, 0

    def __call__(self, exchange: Exchange) -> None:
        body = exchange.body
        with self.lock:
            chat = "messages" in body
            ids = self.tokenizer.encode_chat(body["messages"]) if chat else self.tokenizer.encode(body["prompt"])
            exchange.stream(self.pieces(ids, body["max_tokens"], chat))

    def pieces(self, ids: list[int], count: int, chat: bool) -> Iterator[bytes]:
        stream, made, reason = TextStream(self.tokenizer), 0, None

        def chunk(text: str, finish: str | None = None) -> bytes:
            part = {"delta": {"content": self.alter(text)}} if chat else {"text": self.alter(text)}
            return event({"choices": [{**part, "finish_reason": finish}]})

        for step in self.generator.generate([ids], count, stop_ids=self.stops):
            token, reason, made = step.tokens[0], step.finished[0], made + 1
            assert token is not None
            if reason != "stop" and (text := stream.push(token)):
                yield chunk(text)
        yield chunk(stream.flush(), reason)
        yield usage(made, len(ids) + self.extra)
        yield DONE


@pytest.fixture
def served(model: Path) -> Iterator[Served]:
    made = Served(model)
    with made.generator:
        yield made


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    path = tmp_path / "talk.jsonl"
    lines = [{"prompt": "the cat"}, {"prompt": "a mat, and the dog", "max_tokens": 9}, {"prompt": "x = {'a': [1]}"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize("completions", [False, True])
def test_the_same_engine_agrees(served: Served, model: Path, talk: Path, completions: bool) -> None:
    with Server(served) as server:
        data = ask(server, talk, against=model, completions=completions, max_new_tokens=24, repeat=2,
                   limits=Limits(retries=0))
    assert (data["pass"], data["equal"], data["compared"]) == (True, 3, 3)
    for result in data["prompts"]:
        ours = result["ours"]
        assert result["agreement"]["equal"]
        assert result["agreement"]["common_prefix"] == len(result["text"]) > 0
        assert ours["text"] == result["text"]
        assert [ours[k] for k in ("tokens", "prompt_tokens", "finish_reason")] == [
            result[k] for k in ("tokens", "prompt_tokens", "finish_reason")]
        assert ours["seconds_to_first_token"] > 0
        assert ours["tokens_per_second"] > 0
        assert set(result["remarks"]) <= {UPPER_BOUND}  # text is held back while it ends inside a character
    assert data["prompts"][1]["tokens"] <= 9
    assert len({result["text"] for result in data["prompts"]}) == 3
    if not completions:  # the template was used
        assert data["prompts"][0]["prompt_tokens"] > len(served.tokenizer.encode("the cat"))


def test_another_answer_does_not(served: Served, model: Path, talk: Path, command: Cli) -> None:
    seen = ""

    def alter(text: str) -> str:
        """From the sixth character of an answer on, capitals."""
        nonlocal seen
        kept, seen = text[:max(0, 5 - len(seen))], seen + text
        return kept + text[len(kept):].upper()

    with Server(served) as server:
        honest = ask(server, talk, against=model, max_new_tokens=24, limits=Limits(retries=0))["prompts"]
    served.alter, served.extra = alter, 2

    def altered(exchange: Exchange) -> None:
        nonlocal seen
        seen = ""
        served(exchange)

    with Server(altered) as server:
        words = ["--prompts", talk, "--against", model, "--max-new-tokens", "24"]
        code, printed, err = command.run(server, *words, "--json")
        assert (code, err) == (0, "")  # a difference is a result, not a failure
        data = json.loads(printed)
        code, printed, _ = command.run(server, *words)
    for result, before in zip(data["prompts"], honest, strict=True):
        expected = before["text"][:5] + before["text"][5:].upper()
        assert (result["text"], result["ours"]["text"]) == (expected, before["text"])
        first = next((i for i, (a, b) in enumerate(zip(expected, before["text"], strict=True)) if a != b), None)
        assert result["agreement"]["equal"] is (first is None)
        assert result["agreement"]["common_prefix"] == (len(expected) if first is None else first)
        assert "the two models do not read the same" in result["remarks"][-1]
    assert data["equal"] < 3
    assert f"{data['equal']} of 3 texts equal" in printed
    assert re.search(r"\d+ of \d+ and \d+ characters", printed)


def test_what_our_engine_cannot_take_is_said(served: Served, model: Path, tmp_path: Path, command: Cli) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "the cat " * 400}) + "\n" + json.dumps({"prompt": "the"}))
    with Server(good("x", tokens=1)) as server:
        data = ask(server, path, against=model)
        code, printed, err = command.run(server, "--prompts", path, "--against", model)
    assert [r["failed"] for r in data["prompts"]] == [True, False]
    assert data["prompts"][0]["text"] == "x"
    assert "takes up to 400 (max_context)" in data["prompts"][0]["ours_error"]
    assert (code, err) == (1, "error: 1 of 2 prompts failed\n")
    assert "1: our engine: the prompt has " in printed


def test_exports_that_cannot_be_compared(model: Path, talk: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(model / "tokenizer.json", bare)
    with Server(good("x")) as server:
        with pytest.raises(InputError, match=r"bare: no chat template; compare .* with --completions"):
            ask(server, talk, against=model, tokenizer=bare)
        layer = tmp_path / "layer"
        export(ExportRequest("article", layer, max_context=64))
        with pytest.raises(InputError, match="holds one attention, not a model"):
            ask(server, talk, against=layer)
        assert server.exchanges == []
        assert ask(server, talk, against=model, tokenizer=bare, completions=True)["compared"] == 3
