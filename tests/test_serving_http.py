"""The HTTP server on real sockets, over a tiny real model: answers, streams, every way to ask wrongly, who leaves."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from click.testing import CliRunner

from engines.generate import Generator
from engines.serving.answers import ChatForm, CompletionForm, Piece, TextWriter
from engines.serving.connection import BoundedHead
from engines.serving.meter import Meter
from engines.serving.pool import Limits
from engines.serving.sequence import LENGTH, STOP, Event, Request, Sequence, StepReport
from engines.tokenizer import Tokenizer
from exporter.manifest import Export, open_export
from tests.live_server import EOS, LIMITS, NAME, LiveServer, make_model, serving, settled
from tests.test_generate import small
from tests.test_scheduler import solo_runs
from tests.test_tokenizer import byte_level, write
from validate.__main__ import cli as validate_cli

CHAT = [{"role": "user", "content": "the dog"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    with LiveServer(model) as live:
        yield live


def solo(export: Export, prompt: list[int], count: int) -> list[int]:
    """What `generate` answers."""
    with Generator(export, threads=1) as generator:
        steps = list(generator.generate([prompt], count, stop_ids=(EOS,)))
    return [step.tokens[0] for step in steps if step.tokens[0] is not None]


def events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream, which ends as the API says."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def streamed(text: str) -> str:
    return "".join(c["text"] for e in events(text) for c in e["choices"])


# --- Answers ----------------------------------------------------------------------------------------------------------


def test_an_answer_is_that_of_generate_whole_and_streamed(server: LiveServer) -> None:
    tokenizer = server.service.tokenizer
    for prompt in ("the cat sat", [5, 6, 7]):
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        tokens = solo(server.export, ids, 12)
        ended = tokens[-1] == EOS
        text = tokenizer.decode(tokens[:-1] if ended else tokens)
        whole = server.complete(prompt=prompt, max_tokens=12).json()
        assert whole["choices"] == [{"index": 0, "text": text, "logprobs": None,
                                     "finish_reason": "stop" if ended else "length"}]
        assert whole["usage"]["prompt_tokens"] == len(ids)
        assert whole["usage"]["completion_tokens"] == len(tokens)
        stream = server.complete(prompt=prompt, max_tokens=12, stream=True, stream_options={"include_usage": True})
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert streamed(stream.text) == text
        last = events(stream.text)[-1]
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], len(ids) + len(tokens))


def test_chat_goes_through_the_template(server: LiveServer) -> None:
    tokenizer = server.service.tokenizer
    ids = tokenizer.encode_chat([{"role": "user", "content": "the dog"}])
    tokens = solo(server.export, ids, 9)
    parts = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "dog"}]}]
    for messages in (CHAT, parts):
        body = {"model": NAME, "messages": messages, "temperature": 0, "max_completion_tokens": 9}
        found = server.post("/v1/chat/completions", body).json()
        text = found["choices"][0]["message"]["content"]
        assert text == tokenizer.decode([t for t in tokens if t != EOS])
        assert found["usage"]["prompt_tokens"] == len(ids)
    stream = events(server.post("/v1/chat/completions", {**body, "stream": True}).text)
    assert stream[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in stream) == text
    assert stream[-1]["choices"][0]["finish_reason"] == found["choices"][0]["finish_reason"]


def test_without_max_tokens_a_chat_goes_to_the_context_s_end(server: LiveServer) -> None:
    body = {"model": NAME, "messages": CHAT, "temperature": 0, "ignore_eos": True}
    found = server.post("/v1/chat/completions", body).json()
    assert found["usage"]["total_tokens"] == 600


def test_without_max_tokens_a_completion_has_16_or_what_is_left(server: LiveServer) -> None:
    for prompt, new in ((3, 16), (584, 16), (585, 15), (599, 1)):
        found = server.complete(prompt=[5] * prompt, ignore_eos=True).json()
        assert (found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]) == (new, "length")


def test_several_prompts_and_choices_keep_their_places(server: LiveServer) -> None:
    found = server.complete(prompt=["the cat", "the dog"], n=2, max_tokens=6).json()["choices"]
    alone = [server.complete(prompt=p, max_tokens=6).json()["choices"][0]["text"] for p in ("the cat", "the dog")]
    assert [c["index"] for c in found] == [0, 1, 2, 3]
    assert [c["text"] for c in found] == [alone[0], alone[0], alone[1], alone[1]]
    warm = {"prompt": "the cat", "n": 3, "max_tokens": 8, "temperature": 1.5, "ignore_eos": True}
    drawn = [c["text"] for c in server.complete(**warm, seed=3).json()["choices"]]
    assert len(set(drawn)) == 3
    assert [c["text"] for c in server.complete(**warm, seed=3).json()["choices"]] == drawn
    assert [c["text"] for c in server.complete(**warm, seed=4).json()["choices"]] != drawn
    stream = events(server.complete(**warm, seed=3, stream=True).text)
    assert ["".join(c["text"] for e in stream for c in e["choices"] if c["index"] == i) for i in range(3)] == drawn


def test_stop_texts_end_an_answer_before_them(server: LiveServer) -> None:
    free = server.complete(max_tokens=40, ignore_eos=True).json()["choices"][0]["text"]
    stop = free[9:14]  # within tokens, and over their boundaries
    expected = free[:free.index(stop)]
    body = {"max_tokens": 40, "ignore_eos": True, "stop": ["\N{SNOWMAN}", stop]}
    found = server.complete(**body).json()
    assert found["choices"][0]["text"] == expected
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] < 40
    assert streamed(server.complete(**body, stream=True).text) == expected
    for i in range(1, 12):  # wherever it is cut
        stop = free[i:i + 4]
        assert streamed(server.complete(max_tokens=40, ignore_eos=True, stop=stop, stream=True).text) == (
            free[:free.index(stop)])
    third = solo(server.export, [5, 6, 7], 3)[2]
    one = server.complete(max_tokens=40, ignore_eos=True, stop_token_ids=[third]).json()
    assert (one["usage"]["completion_tokens"], one["choices"][0]["finish_reason"]) == (3, "stop")


def test_log_probabilities_are_the_model_s(server: LiveServer) -> None:
    found = server.complete(max_tokens=5, logprobs=3, ignore_eos=True).json()["choices"][0]["logprobs"]
    assert [len(found[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [5] * 4
    assert all(max(top.values()) == own for own, top in zip(found["token_logprobs"], found["top_logprobs"],
                                                            strict=True))  # greedy
    assert found["text_offset"][0] == 0
    warm = {"model": NAME, "messages": CHAT, "max_tokens": 4, "seed": 1, "temperature": 1.7, "logprobs": True}
    chat = server.post("/v1/chat/completions", {**warm, "top_logprobs": 20}).json()
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    assert all(len(entry["top_logprobs"]) == 20 and entry["logprob"] < 0 for entry in content)
    bare = server.post("/v1/chat/completions", warm).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[]] * 4
    assert [entry["logprob"] for entry in bare] == pytest.approx([entry["logprob"] for entry in content], rel=1e-4)


def test_log_probabilities_of_tokens_that_are_parts_of_characters(tmp_path: Path) -> None:
    """As OpenAI's API tells them: bytes of each one's own, and no two alternatives under one name."""
    tokenizer = Tokenizer(write(tmp_path / "tokenizer", byte_level()))
    snowman = [tokenizer.token_id(spelled) or 0 for spelled in ("â", "ĺ", "ĥ")]  # E2 98 83
    the, nothing = tokenizer.encode("the")[-1], 9999
    top = tuple((token, -1.0 - i) for i, token in enumerate([*snowman, the, nothing, EOS]))
    said = [Piece(0, token=snowman[0], logprob=-1.0, top=top), Piece(0, token=7, logprob=-9.0, top=top[:1])]
    content = ChatForm(tokenizer, 6).choice(0, said)["logprobs"]["content"]
    assert [entry["token"] for entry in content[0]["top_logprobs"]] == [
        "\\xe2", "\\x98", "\\x83", "the", "token_id:9999", "</s>"]
    assert [entry["bytes"] for entry in content[0]["top_logprobs"]] == [
        [0xE2], [0x98], [0x83], [*b"the"], None, [*b"</s>"]]
    assert bytes(entry["bytes"][0] for entry in content[0]["top_logprobs"][:3]).decode() == "\N{SNOWMAN}"
    found = CompletionForm(tokenizer, 6).choice(0, said)["logprobs"]
    assert found["tokens"][0] == "bytes:\\xe2"
    assert found["top_logprobs"] == [
        {"bytes:\\xe2": -1.0, "bytes:\\x98": -2.0, "bytes:\\x83": -3.0, "the": -4.0, "token_id:9999": -5.0,
         "</s>": -6.0}, {"bytes:\\xe2": -1.0, found["tokens"][1]: -9.0}]  # the chosen one comes with the likeliest


def test_tokens_of_one_text_are_told_apart(tmp_path: Path) -> None:
    library = small()
    library.add_tokens(["\N{LOWER ONE EIGHTH BLOCK}the", " the"])  # both read " the"
    tokenizer = Tokenizer(write(tmp_path / "tokenizer", library))
    first, second = (tokenizer.token_id(t) or 0 for t in ("\N{LOWER ONE EIGHTH BLOCK}the", " the"))
    assert tokenizer.piece(first) == tokenizer.piece(second) == b" the"
    top = ((first, -0.5), (second, -1.0))
    for token, own, likeliest in ((first, -0.5, {" the": -0.5, f"token_id:{second}": -1.0}),
                                  (second, -1.0, {f"token_id:{first}": -0.5, " the": -1.0})):
        found = CompletionForm(tokenizer, 2).choice(0, [Piece(0, token=token, logprob=own, top=top)])["logprobs"]
        assert found["top_logprobs"] == [likeliest]
        assert found["top_logprobs"][0][found["tokens"][0]] == own


@pytest.mark.parametrize("stops", [[], ["cat s"], ["the cat sat on the mat, and"], ["zzz", "dog"], ["t"]])
def test_text_is_cut_at_the_first_stop_however_tokens_fall(model: Path, stops: list[str]) -> None:
    tokenizer = Tokenizer(model.parent / "checkpoint")
    ids = tokenizer.encode("the cat sat on the mat, and the dog did not")
    text = tokenizer.decode(ids)
    found = [text.find(stop) for stop in stops if stop in text]
    writer, sequence, out = TextWriter(tokenizer, 0, stops), Sequence(0, Request((1,), 99), 0, 0.0), ""
    for i, token in enumerate(ids):
        piece = writer.take(Event(sequence, token, LENGTH if i == len(ids) - 1 else None))
        out += piece.text
        if piece.finished:
            break
    assert out == (text[:min(found)] if found else text)
    assert piece.finished == (STOP if found else LENGTH)


# --- The official client ----------------------------------------------------------------------------------------------


def test_the_official_client(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    whole = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, max_tokens=8)  # type: ignore[arg-type]
    stream = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, max_tokens=8, stream=True,  # type: ignore[arg-type]
                                            stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    completion = client.completions.create(model=NAME, prompt="the cat", temperature=0, max_tokens=4, logprobs=2)
    assert completion.choices[0].logprobs is not None
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' is not here; this server has 'tiny'"):
        client.chat.completions.create(model="gpt", messages=CHAT)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="max_tokens: Input should be greater than or equal to 1"):
        client.completions.create(model=NAME, prompt="a", max_tokens=-1)


def test_our_own_endpoint_client(server: LiveServer, model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text, "max_tokens": 8}) + "\n" for text in ("the cat", "a mat")))
    done = CliRunner().invoke(validate_cli, ["endpoint", "--base-url", f"{server.url}/v1", "--model", NAME, "--prompts",
                                             str(prompts), "--against", str(model), "--json"])
    data = json.loads(done.output)
    assert (done.exit_code, data["pass"]) == (0, True), done.output
    assert [entry["agreement"]["equal"] for entry in data["prompts"]] == [True, True]


# --- Asked wrongly ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "status", "said", "param"), [
    ({"max_tokens": -1}, 400, "max_tokens: Input should be greater than or equal to 1 (it is -1)", "max_tokens"),
    ({"max_tokens": "5"}, 400, "max_tokens: Input should be a valid integer", "max_tokens"),
    ({"temperature": "hot"}, 400, 'temperature: Input should be a valid number (it is "hot")', "temperature"),
    ({"temperature": 3}, 400, "temperature: Input should be less than or equal to 2", "temperature"),
    ({"top_p": 0}, 400, "top_p: Input should be greater than 0", "top_p"),
    ({"n": 0}, 400, "n: Input should be greater", "n"), ({"n": 9}, 400, "9 choices; at most 8", None),
    ({"prompt": 5}, 400, "prompt: expected a text, a list of texts, of token ids", "prompt"),
    ({"prompt": []}, 400, "prompt: expected a text", "prompt"),
    ({"prompt": [1, "a"]}, 400, "prompt: expected a text", "prompt"),
    ({"prompt": [900]}, 400, "the prompt holds token 900; expected 0 to 127", None),
    ({"prompt": [True]}, 400, "prompt: expected a text", "prompt"),
    ({"stop": ["a"] * 5}, 400, "stop: expected a text or up to 4 texts", "stop"),
    ({"stop": ""}, 400, "stop: expected a text or up to 4", "stop"),
    ({"logprobs": 6}, 400, "logprobs: Input should be less than or equal to 5", "logprobs"),
    ({"seed": 1.5}, 400, "seed: Input should be a valid integer", "seed"),
    ({"stream": "yes"}, 400, "stream: Input should be a valid boolean", "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options are for streams", None),
    ({"echo": True}, 400, "echo is not supported here and would change the answer; leave it out", None),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias is not supported here", None),
    ({"best_of": 3}, 400, "best_of is 3, n is 1: this server draws the n answers that it returns, not more to choose "
     "from; expected them equal; leave best_of out", None),
    ({"best_of": 1, "n": 2}, 400, "best_of is 1, n is 2", None),
    ({"frequency_penalty": 0.5}, 400, "frequency_penalty is not supported here", None),
    ({"model": "gpt"}, 404, "the model 'gpt' is not here; this server has 'tiny'", "model"),
    ({"prompt": [5] * 590, "max_tokens": 11}, 400, "the prompt has 590 tokens, and max_tokens is 11, 601 in all; this "
     "model takes up to 600; shorten the prompt or lower max_tokens", "prompt"),
    ({"prompt": [5] * 600}, 400, "the prompt has 600 tokens; this model takes up to 600; shorten the prompt",
     "prompt")])
def test_a_wrong_request_gets_one_clear_message(server: LiveServer, body: dict[str, Any], status: int, said: str,
                                                param: str | None) -> None:
    answer = server.complete(**body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}
    assert server.complete(max_tokens=1).status_code == 200


@pytest.mark.parametrize("harmless", [{"user": "me"}, {"frequency_penalty": 0}, {"nobody_knows": 1}, {"best_of": 1},
                                      {"best_of": 2, "n": 2}, {"logit_bias": {}}, {"echo": False},
                                      {"n": None, "stop": None, "seed": None}])
def test_what_changes_nothing_is_taken(server: LiveServer, harmless: dict[str, Any]) -> None:
    assert server.complete(max_tokens=1, **harmless).status_code == 200


@pytest.mark.parametrize(("body", "said"), [
    ({"messages": []}, "messages: List should have at least 1 item"), ({}, "messages: Field required"),
    ({"messages": "hello"}, "messages: Input should be a valid list"),
    ({"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "this model reads text"),
    ({"messages": [{"role": "user", "content": []}]}, "this model reads text"),
    ({"messages": [{"role": "user"}]}, "messages.0: a message of the role 'user' without content; expected a text"),
    ({"messages": [*CHAT, {"role": "assistant", "content": None}, *CHAT]}, "messages.1: a message of the role 'assis"),
    ({"messages": [*CHAT, {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}, *CHAT]},
     "messages.1: tool_calls is not supported here: this server calls no tools; leave the message out, or say in a "),
    ({"messages": [*CHAT, {"role": "tool", "content": "4", "tool_call_id": "a"}]}, "messages.1: tool_call_id is not"),
    ({"messages": [*CHAT, {"role": "function", "content": "4"}]}, "messages.1: the role function is not supported"),
    ({"messages": CHAT, "top_logprobs": 3}, "top_logprobs come with logprobs"),
    ({"messages": CHAT, "tools": [{"type": "function"}]}, "tools is not supported here"),
    ({"messages": CHAT, "response_format": {"type": "json_object"}}, "response_format is not supported here"),
    ({"messages": CHAT, "max_tokens": 599}, "max_tokens is 599")])
def test_wrong_conversations(server: LiveServer, body: dict[str, Any], said: str) -> None:
    answer = server.post("/v1/chat/completions", {"model": NAME, **body})
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


def raw(server: LiveServer, data: bytes, *, close: bool = False, seconds: float = 20) -> bytes:
    """Bytes to the socket as they are, and what comes back until it closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as line:
        line.sendall(data)
        if close:
            return b""
        parts = []
        while part := line.recv(65536):
            parts.append(part)
        return b"".join(parts)


def test_bodies_that_are_none(server: LiveServer) -> None:
    def post(content: bytes, kind: str = "application/json") -> tuple[int, str]:
        answer = httpx2.post(f"{server.url}/v1/completions", content=content, headers={"content-type": kind})
        return answer.status_code, answer.json()["error"]["message"]

    wanted = "expected a JSON object, sent with Content-Type: application/json"
    assert post(b"{bad") == (400, "the body is not JSON: Expecting property name enclosed in double quotes (line 1, "
                             f"column 2); {wanted}")
    assert post(b'{"model": "tiny",\n "prompt": }')[1].partition("(")[2] == f"line 2, column 12); {wanted}"
    assert post(b'{"model": "\xe9"}') == (400, "the body is not UTF-8: byte 0xe9 at 11 (invalid continuation byte); "
                                          f"{wanted} in UTF-8")
    assert post(b"") [0] == 400
    assert post(b"[1]") == (400, "the body: expected a JSON object, sent with Content-Type: application/json")
    assert post(b'{"model":"tiny"}', "text/plain")[0] == 400
    assert post(b'{"model":' + b"[" * 100_000) == (400, f"the body is nested too deep; {wanted}")
    assert post(b'{"model":"tiny","prompt":"\\ud800"}')[0] == 400  # half a character
    assert post(b'{"model":"tiny","prompt":[5],"temperature":NaN}')[0] == 400
    status, said = post(b"x" * 10_000_000)
    assert (status, said) == (413, "the body has 10000000 bytes; this server takes up to 2000000; send less, or serve "
                              "with a larger --max-body")
    for path, expected in (("/nope", 404), ("/v1/nope", 404)):
        assert httpx2.get(f"{server.url}{path}").status_code == expected
    wrong = httpx2.get(f"{server.url}/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["message"]) == (
        405, "GET is not what /v1/completions takes; ask with POST")
    assert "ask with GET or HEAD" in httpx2.post(f"{server.url}/health").text
    assert server.complete(max_tokens=1).status_code == 200


def test_who_sends_too_much_hears_so(server: LiveServer) -> None:
    """Not a reset: whether a length was said or not, and though the client reads nothing before all is sent."""
    said = b"send less, or serve with a larger --max-body"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    whole = raw(server, head + b"Content-Length: 10000000\r\n\r\n" + b" " * 10_000_000)
    assert whole.startswith(b"HTTP/1.1 413 ")
    assert b"the body has 10000000 bytes; this server takes up to 2000000; " + said in whole
    chunk = b"186a0\r\n" + b" " * 100_000 + b"\r\n"
    chunked = raw(server, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 100 + b"0\r\n\r\n")
    assert chunked.startswith(b"HTTP/1.1 413 ")
    assert b"the body has more than the 2000000 bytes that this server takes; " + said in chunked


def test_probes_may_ask_for_the_head(server: LiveServer) -> None:
    for path in ("/", "/health", "/metrics", "/status.json"):
        answer = httpx2.head(f"{server.url}{path}")
        assert (answer.status_code, answer.content) == (200, b"")


def errors(server: LiveServer) -> dict[str, str]:
    """Prometheus' counts of them by status."""
    return dict(re.findall(r'^mla_errors_total\{status="(\d+)"\} (.*)$', httpx2.get(f"{server.url}/metrics").text,
                           re.MULTILINE))


def test_errors_are_counted_by_status(model: Path) -> None:
    limits = Limits(sequences=1, queue=0, chunk=64, budget=20_000_000, bucket=32)
    with LiveServer(model, limits, key="sesame", max_body=5_000, slowed=0.02) as server, ThreadPoolExecutor(4) as pool:
        good = {"Authorization": "Bearer sesame"}
        ask = {"model": NAME, "prompt": [5, 6], "max_tokens": 30, "ignore_eos": True}
        found = [a.status_code for a in pool.map(lambda _: server.post("/v1/completions", ask, headers=good), range(4))]
        assert sorted(found) == [200, 429, 429, 429]
        server.post("/v1/completions", ask)
        server.post("/v1/completions", {**ask, "prompt": "a" * 6_000}, headers=good)
        server.post("/v1/completions", {**ask, "n": 0}, headers=good)
        httpx2.get(f"{server.url}/nope")  # no part of the API
        assert errors(server) == {"429": "3.0", "401": "1.0", "413": "1.0", "400": "1.0"}


def test_a_body_without_end_is_cut_off_and_half_a_body_waited_for_so_long(model: Path) -> None:
    with LiveServer(model, max_body=50_000, body_timeout=0.3) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        endless = raw(server, head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1000\r\n" + b" " * 4096 + b"\r\n" + (
            b"ffff\r\n" + b" " * 65535 + b"\r\n"))
        assert endless.startswith(b"HTTP/1.1 413 ")
        half = raw(server, head + b'Content-Length: 100\r\n\r\n{"model": ')
        assert half.startswith(b"HTTP/1.1 408 ")
        assert (b"10 bytes of the body came within 0.3 s, and not its end; send it whole, or serve with a longer "
                b"--body-timeout") in half
        with pytest.raises((BrokenPipeError, ConnectionResetError)):  # and byte by byte it has no longer
            trickle(server, head + b"Content-Length: 100\r\n\r\n", b"x" * 99)
        raw(server, head + b'Content-Length: 100\r\n\r\n{"mo', close=True)  # and one who hangs up
        assert server.complete(max_tokens=1).status_code == 200


def trickle(server: LiveServer, first: bytes, rest: bytes) -> None:
    """`first` at once, then a byte every 50 ms, until the server hangs up."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as line:
        line.sendall(first)
        for byte in rest:
            time.sleep(0.05)
            line.sendall(bytes([byte]))


def test_a_head_has_to_come_in_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it comes byte by byte, half, or not at all; the first on its connection, or the next."""
    monkeypatch.setattr(BoundedHead, "head_seconds", 0.4)
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with LiveServer(model, slowed=0.02) as server:
        begin = time.monotonic()
        half = raw(server, whole[:-2])
        assert 0.3 < time.monotonic() - begin < 5
        assert half.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        error = json.loads(half.partition(b"\r\n\r\n")[2])["error"]
        assert (error["message"], error["code"]) == (
            "31 bytes of a request's head came within 0.4 s, and not its end; send it whole", "head_timeout")
        begin = time.monotonic()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            trickle(server, b"GET /health HTTP/1.1\r\n", b"x-long: " + b"a" * 200)
        assert time.monotonic() - begin < 5
        assert errors(server) == {"408": "2.0"}
        assert raw(server, b"") == b""  # who says nothing is told nothing
        assert errors(server) == {"408": "2.0"}
        again = raw(server, whole + whole[:9])
        assert again.startswith(b"HTTP/1.1 200 OK")
        assert b"HTTP/1.1 408 Request Timeout" in again
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as line:
            for _ in range(2):
                line.sendall(whole)
                found = b""
                while b'"ok"' not in found:
                    found += line.recv(65536)
                    assert found.startswith(b"HTTP/1.1 200 OK")
                time.sleep(0.6)  # between two requests one may be silent for longer
            line.sendall(whole[:9])
            assert line.recv(65536).startswith(b"HTTP/1.1 408 ")
        assert server.complete(max_tokens=60, ignore_eos=True).status_code == 200  # an answer may take longer


# --- Who comes and who leaves -----------------------------------------------------------------------------------------


def test_a_key(model: Path) -> None:
    with LiveServer(model, key="sesame") as server:
        for sent in (None, "Bearer wrong", "sesame", "Basic sesame", "Bearer", "Bearer sesame2"):
            headers = {"Authorization": sent} if sent else {}
            answer = server.post(
                "/v1/completions", {"model": NAME, "prompt": "a"}, headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert "sesame" not in answer.text
        good = {"Authorization": "Bearer sesame"}
        assert server.post("/v1/completions", {"model": NAME, "prompt": "a"}, headers=good).status_code == 200
        assert httpx2.get(f"{server.url}/v1/models").status_code == 401
        for path in ("/health", "/metrics", "/status.json", "/"):
            assert httpx2.get(f"{server.url}{path}").status_code == 200


def test_a_full_queue_says_come_back(model: Path) -> None:
    limits = Limits(sequences=1, queue=1, chunk=64, budget=20_000_000, bucket=32)
    with LiveServer(model, limits, slowed=0.02) as server, ThreadPoolExecutor(6) as pool:
        asked = list(pool.map(lambda _: server.complete(max_tokens=30, ignore_eos=True), range(6)))
        found = sorted(answer.status_code for answer in asked)
        assert found == [200, 200, 429, 429, 429, 429]
        busy = next(a for a in asked if a.status_code == 429)
        assert busy.headers["retry-after"] == "1"
        assert busy.json()["error"]["message"] == "2 sequences run or wait, of 1 and 1 that may; try again later"


def test_a_request_that_takes_too_long(model: Path) -> None:
    with LiveServer(model, request_timeout=0.3, slowed=0.02) as server:
        late = server.complete(max_tokens=500, ignore_eos=True)
        assert (late.status_code, late.json()["error"]["code"]) == (408, "expired")
        text = server.complete(max_tokens=500, ignore_eos=True, stream=True).text
        last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "expired"
        assert "[DONE]" not in text
        assert server.settled()["ended"]["expired"] == 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_is_killed_frees_its_rows_at_once(model: Path, stream: bool) -> None:
    with LiveServer(model, slowed=0.02) as server:
        body = json.dumps({"model": NAME, "prompt": [5] * 40, "max_tokens": 500, "ignore_eos": True, "stream": stream,
                           "n": 2}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            while httpx2.get(f"{server.url}/status.json").json()["cache"]["used"] < 45 * 208:
                time.sleep(0.01)
        begin = time.monotonic()
        status = server.settled()
        assert time.monotonic() - begin < 2
        assert status["cache"]["sequences"] == 0
        assert status["ended"] == {"cancelled": 2}
        assert status["new_tokens"] < 400
        assert server.complete(max_tokens=1).status_code == 200


def test_stopping_finishes_what_runs_and_refuses_the_rest(model: Path) -> None:
    limits = Limits(sequences=1, queue=9, chunk=64, budget=20_000_000, bucket=32)
    with LiveServer(model, limits, slowed=0.02) as server, ThreadPoolExecutor(3) as pool:
        running = pool.submit(server.complete, max_tokens=40, ignore_eos=True)
        while not server.service.worker.scheduler.running:
            time.sleep(0.01)
        waiting = pool.submit(server.complete, max_tokens=40)
        while server.service.worker.outstanding < 2:
            time.sleep(0.01)
        server.service.worker.drain()
        late = server.complete(max_tokens=1)
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        assert (waiting.result().status_code, waiting.result().json()["error"]["code"]) == (503, "refused")
        assert httpx2.get(f"{server.url}/health").status_code == 503
        assert running.result().json()["usage"]["completion_tokens"] == 40


def test_a_fault_of_the_scheduler_s_is_a_500_and_the_server_goes_on(model: Path, monkeypatch: pytest.MonkeyPatch,
                                                                    caplog: pytest.LogCaptureFixture) -> None:
    with LiveServer(model) as server:
        scheduler = server.service.worker.scheduler
        with monkeypatch.context() as broken:
            broken.setattr(scheduler, "_prefill", lambda waiting: 1 / 0)
            answer = server.complete(max_tokens=3)
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            500, "the model failed: the server made an error; see its log")
        assert "ZeroDivisionError" in caplog.text
        assert server.complete(max_tokens=3).status_code == 200
        assert server.settled()["cache"]["sequences"] == 0


def wait_for(what: Callable[[], Any], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_command_that_fails_ends_its_own_request(model: Path, monkeypatch: pytest.MonkeyPatch,
                                                   caplog: pytest.LogCaptureFixture) -> None:
    """Its ticket is told, the thread goes on, and who runs has no part in it."""
    def fails(*_: Any, **__: Any) -> None:
        raise KeyError("planted")

    with LiveServer(model, slowed=0.01) as server, ThreadPoolExecutor(1) as pool:
        worker = server.service.worker
        running = pool.submit(server.complete, max_tokens=150, ignore_eos=True)
        wait_for(lambda: worker.scheduler.running)
        with monkeypatch.context() as broken:
            broken.setattr(worker.scheduler, "submit", fails)
            answer = server.complete(max_tokens=3, n=2)
            whole = server.complete(max_tokens=3, stream=True)
        for told in (answer, whole):
            assert (told.status_code, told.json()["error"]["message"]) == (
                500, "the model failed: the server made an error; see its log")
        assert "planted" in caplog.text
        assert worker.outstanding == 1
        with monkeypatch.context() as broken:  # a client leaves, and that fails
            broken.setattr(worker, "_give_up", fails)
            raw(server, b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n'
                b'Content-Length: 62\r\n\r\n{"model": "tiny", "prompt": [5], "max_tokens": 40, "stream": 1 }',
                close=True)
            assert running.result().json()["usage"]["completion_tokens"] == 150
        assert server.complete(max_tokens=3).status_code == 200
        wait_for(lambda: worker.outstanding == 0)


def test_who_stops_a_server_does_not_wait_for_ever(model: Path, monkeypatch: pytest.MonkeyPatch,
                                                   caplog: pytest.LogCaptureFixture) -> None:
    """Though ending what runs fails: whoever waits for an answer is told, and the thread ends."""
    with LiveServer(model, slowed=0.02) as server, ThreadPoolExecutor(1) as pool:
        worker, finished = server.service.worker, list[str]()
        running = pool.submit(server.complete, max_tokens=500, ignore_eos=True)
        wait_for(lambda: worker.scheduler.running)

        def fails(sequence: Sequence) -> None:
            finished.append("rows")
            raise KeyError("planted")

        monkeypatch.setattr(worker.scheduler.pool, "release", fails)
        stopping = threading.Thread(target=worker.stop, daemon=True)
        stopping.start()
        stopping.join(20)
        assert not stopping.is_alive()
        assert (running.result().status_code, running.result().json()["error"]["code"]) == (503, "refused")
        assert finished == ["rows"]
        assert "planted" in caplog.text


def test_of_several_prompts_all_run_or_none(model: Path) -> None:
    with LiveServer(model, slowed=0.02) as server:
        answer = server.complete(prompt=[[5, 6], [5] * 590], max_tokens=100, ignore_eos=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        answer = server.complete(prompt=[[5, 6], [900]], max_tokens=100, ignore_eos=True)
        assert answer.status_code == 400
        status = server.settled()
        assert status["new_tokens"] <= 1  # the first was given up at once
        assert status["cache"]["sequences"] == 0


def test_a_sink_that_fails_ends_its_own_sequence(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LiveServer(model) as server:
        def fails(event: Event) -> bool:
            raise RuntimeError("Event loop is closed")

        server.service.worker.submit(Request((5, 6), 500), fails)
        assert server.complete(max_tokens=3).status_code == 200
        assert server.settled()["cache"]["sequences"] == 0
        assert "nobody takes its tokens" in caplog.text


def test_prefixes_are_reused_between_requests(model: Path) -> None:
    with LiveServer(model) as server:
        prompt = [(7 * i) % 120 + 2 for i in range(100)]
        first = server.complete(prompt=prompt, max_tokens=8).json()
        second = server.complete(prompt=prompt, max_tokens=8).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 96  # whole blocks of 16
        assert second["choices"] == first["choices"]


# --- Many at once -----------------------------------------------------------------------------------------------------


class Storm:
    """Requests of mixed lengths from many clients, some of which leave at a random moment; answers kept to compare."""

    def __init__(self, url: str, requests: int, clients: int, seed: int) -> None:
        self.url, self.clients, draw = url, clients, random.Random(seed)
        self.port = int(url.rpartition(":")[2])
        self.asked = [(draw.choices(range(2, 128), k=draw.choice((1, 3, 9, 30, 110, 240))), draw.choice((1, 4, 12, 40)),
                       draw.random() < 0.2, draw.uniform(0.0, 0.3), draw.random() < 0.5) for _ in range(requests)]
        self.errors, self.cancelled = list[str](), 0
        self.answers = dict[int, str]()
        self._lock = threading.Lock()

    def run(self) -> None:
        with ThreadPoolExecutor(self.clients) as pool:
            list(pool.map(self._ask, range(len(self.asked))))

    def _ask(self, number: int) -> None:
        prompt, new, leaves, after, stream = self.asked[number]
        body = {"model": NAME, "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True,
                "stream": stream}
        try:
            if leaves:
                self._leave(body, after)
                with self._lock:
                    self.cancelled += 1
                return
            answer = httpx2.post(f"{self.url}/v1/completions", json=body, timeout=120)
            text = streamed(answer.text) if stream else answer.json()["choices"][0]["text"]
            self.answers[number] = text
        except Exception as error:
            self.errors.append(f"{number}: {error!r}")

    def _leave(self, body: dict[str, Any], after: float) -> None:
        data = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", self.port)) as line:
            line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
            time.sleep(after)

    def flips(self, model: Path) -> int:
        """Answers that part from their solo run at a near tie; any other difference fails."""
        requests = {n: Request(tuple(self.asked[n][0]), self.asked[n][1]) for n in self.answers}
        decode, counted = Tokenizer(model.parent / "checkpoint").decode, 0
        with_gaps = solo_runs(open_export(model), list(requests.values()))
        for number, (tokens, gaps) in zip(requests, with_gaps, strict=True):
            if self.answers[number] != decode(tokens):
                prompt, new = self.asked[number][:2]
                body = {"model": NAME, "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
                assert min(gaps) <= 1e-3, f"{number} parted from its solo run: {body}"
                counted += 1
        return counted


def check_storm(url: str, requests: int, clients: int, seed: int) -> tuple[Storm, dict[str, Any]]:
    """A storm, and the status once it is over: no error but the cancelled, and the cache back to zero."""
    storm = Storm(url, requests, clients, seed)
    storm.run()
    assert storm.errors == []
    assert len(storm.answers) + storm.cancelled == requests
    status = settled(url)
    assert status["cache"]["sequences"] == status["cache"]["used"] == 0
    assert status["cache"]["total"] == status["cache"]["staging"]
    assert status["cache"]["peak"] <= status["cache"]["budget"]
    assert set(status["ended"]) <= {"length", "cancelled"}
    return storm, status


def test_a_storm(model: Path) -> None:
    limits = Limits(sequences=8, queue=60, chunk=64, budget=LIMITS.budget, prefixes=0, bucket=32, like=128)
    with LiveServer(model, limits) as server:
        storm, status = check_storm(server.url, 60, 16, 0)
    assert storm.cancelled > 3
    assert {"growth", "swap", "move"} <= set(status["copied_bytes"])
    assert storm.flips(model) <= 1


def resident(process: int) -> int:
    """Bytes of memory that a process has."""
    return int(re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())[0]) * 1024


@pytest.mark.slow
def test_the_whole_storm_in_rounds(model: Path) -> None:
    storms, memory = list[Storm](), list[int]()
    with serving(model, "--max-queue", "200", "--prefix-budget", "0") as (process, said):
        for number in range(4):  # in the first one, runtime and allocator take what they keep
            storm, status = check_storm(said["url"], 200, 32, number)
            storms.append(storm)
            memory.append(resident(process.pid))
    flipped = sum(storm.flips(model) for storm in storms)
    print({"flips": flipped, "ended": status["ended"], "resident": memory, "copied": status["copied_bytes"]})
    assert flipped <= 4
    assert {"growth", "swap"} <= set(status["copied_bytes"])
    assert memory[3] <= memory[1] * 1.01, memory  # flat over three rounds


def test_a_changed_answer_is_seen(model: Path) -> None:
    with LiveServer(model) as server:
        storm = Storm(server.url, 4, 2, 7)
        storm.asked = [(*one[:2], False, *one[3:]) for one in storm.asked]
        storm.run()
        assert storm.flips(model) == 0
        storm.answers[0] = storm.answers[0] + "x"
        with pytest.raises(AssertionError, match="0 parted from its solo run"):
            storm.flips(model)


# --- Figures ----------------------------------------------------------------------------------------------------------


def test_figures_for_prometheus_and_for_the_page(model: Path) -> None:
    with LiveServer(model) as server:
        for _ in range(3):
            server.complete(max_tokens=5, ignore_eos=True)
        status = server.settled()
        assert (status["requests"], status["prompt_tokens"], status["new_tokens"]) == (3, 9, 15)
        assert status["ended"] == {"length": 3}
        assert status["steps"] == {"prefill": 3, "decode": 12}
        assert status["copied_bytes"]["new"] == (3 * 3 + 12) * status["cache"]["bytes_per_token"]
        text = httpx2.get(f"{server.url}/metrics").text
        for line in ("mla_requests_total 3.0", "mla_new_tokens_total 15.0", 'mla_ended_total{reason="length"} 3.0',
                     'mla_sequences{state="queued"} 0.0', "mla_batch 0.0", 'mla_cache_bytes{purpose="sequences"} 0.0',
                     "mla_seconds_to_first_token_count 3.0", "mla_step_seconds_count 15.0"):
            assert f"\n{line}\n" in text, line
        assert "mla_tokens_per_second " in text


def test_rates_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One a second, each over ten seconds or what there was; the last 120, and nothing kept of what was before."""
    now = [1000.0]
    monkeypatch.setattr("engines.serving.meter.time.monotonic", lambda: now[0])
    meter, sequence = Meter(LIMITS), Sequence(0, Request((1,), 9), 0, 0.0)
    assert meter.status()["tokens_per_second_history"] == [0]
    for second in range(300):
        now[0] = 1000.25 + second
        for _ in range(4 if second < 20 else 0 if second < 290 else 8):
            meter.stepped(StepReport("decode", (Event(sequence, 5),)))
        if second == 4:
            now[0] += 0.5
            assert meter.status()["tokens_per_second_history"] == [4, 4, 4, 4, pytest.approx(20 / 4.75, abs=0.01)]
        if second == 21:
            assert meter.status()["tokens_per_second_history"][-3:] == [4, 3.6, pytest.approx(32 / 9.25, abs=0.01)]
    status = meter.status()
    assert len(status["tokens_per_second_history"]) == 121
    assert status["tokens_per_second_history"][:3] == [0] * 3
    assert status["tokens_per_second_history"][-2:] == [7.2, status["tokens_per_second"]]
    assert status["tokens_per_second"] == pytest.approx(80 / 9.25, abs=0.01)
    assert len(meter._recent) <= 130
