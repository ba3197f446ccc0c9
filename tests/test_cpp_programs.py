"""The C++ programs and the package: the server under load and bad bodies, a consumer's project, the TensorRT side.

No CUDA device is at hand where these run: the TensorRT side is compiled with warnings as errors, linked against
TensorRT-RTX's library, and started, to say that nothing ran.
"""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.build import BuildRequest, build
from engines.records import open_engines
from exporter.export import ExportRequest, export
from exporter.manifest import Export
from tests import cpp_toolchain
from tests.model_checkpoints import VOCAB, tiny_checkpoint
from tests.test_cpp import compiled, in_python, run, sanitized, scenario

pytestmark = pytest.mark.cpp
MAX_CONTEXT = 600

CONSUMER = """
cmake_minimum_required(VERSION 3.22)
project(consumer CXX)
find_package(mla 0.1 REQUIRED)
add_executable(consumer main.cpp)
target_link_libraries(consumer PRIVATE mla::mla)
"""
MAIN = """
#include <mla/mla.hpp>
#include <cstdio>
int main(int, char** words) {
  const mla::Model model(words[1]);
  mla::Context context = model.context();
  mla::Logits logits = context.prefill({{1, 306 % 160, 46}});
  for (int i = 0; i < 5; ++i) {
    const auto token = mla::greedy(logits.row(0), logits.vocabulary(), i, 0);
    std::printf("%d ", int(token));
    logits = context.decode({token});
  }
}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Export:
    folder = tmp_path_factory.mktemp("cpp")
    return export(ExportRequest(str(tiny_checkpoint(folder / "checkpoint", "youtu")), folder / "export",
                                max_context=MAX_CONTEXT))


def need_server(variant: str) -> Path:
    def make() -> Path:
        if not (cpp_toolchain.debian() / "usr" / "include" / "httplib.h").is_file():
            raise cpp_toolchain.Unavailable("no cpp-httplib here")
        return cpp_toolchain.program("mla-server", variant)

    return compiled(make)


class Server:
    """mla-server with some words, at a free port."""

    def __init__(self, program: Path, *words: object) -> None:
        self.process = subprocess.Popen([str(program), *map(str, words), "--port", "0"], stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, env=sanitized())
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " at http://127.0.0.1:" in line, self.process.communicate()
        self.port = int(line.rsplit(":", 1)[1])

    def ask(self, body: str | bytes, method: str = "POST", path: str = "/generate") -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def end(self, how: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(how)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


@pytest.fixture
def serve(made: Export) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(variant: str, *words: object) -> Server:
        servers.append(Server(need_server(variant), made.folder, *words))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


def test_a_server_answers_many_at_once_as_python_does(made: Export, serve: Callable[..., Server]) -> None:
    draw = np.random.default_rng(2)
    prompts = [draw.integers(2, VOCAB, int(size)).tolist() for size in draw.integers(1, 50, 40)]
    expected = [in_python(made, [prompt], 10, (1,))[0] for prompt in prompts]
    server = serve("sanitized", "--contexts", 4)
    assert server.ask("", "GET", "/health") == (200, {"status": "ok", "contexts": 4})
    with ThreadPoolExecutor(8) as pool:
        bodies = [json.dumps({"tokens": prompt, "max_new_tokens": 10}) for prompt in prompts]
        found = list(pool.map(server.ask, bodies))
    assert [status for status, _ in found] == [200] * len(prompts)
    assert [answer["tokens"] for _, answer in found] == expected
    assert server.end() == (0, "")


def test_bad_requests_are_answered_and_change_nothing(made: Export, serve: Callable[..., Server]) -> None:
    server = serve("sanitized", "--contexts", 2, "--max-rows", 100)
    good = {"tokens": [5, 6, 7], "max_new_tokens": 4}
    first = server.ask(json.dumps(good))
    cases: list[tuple[str | bytes, str]] = [
        ("", "the body is not JSON"), ("{", "the body is not JSON"), (b"\xff\xfe", "the body is not JSON"),
        ("[]", "body is a list; expected an object"), ("[" * 100_000, "the body is not JSON"),
        ("[" * 100_000 + "]" * 100_000, "body is a list"),
        (f'{{"tokens": [{"[" * 100_000}{"]" * 100_000}]}}', "body.tokens[0] is a list"),
        ("{}", "body: no tokens; expected one"), ('{"tokens": 5}', "body.tokens is 5; expected a list"),
        ('{"tokens": []}', "prompt 0 has no tokens"), ('{"tokens": ["a"]}', 'body.tokens[0] is "a"; expected a whole'),
        ('{"tokens": [1.5]}', "body.tokens[0] is 1.5"), ('{"tokens": [-1]}', "body.tokens[0] is -1"),
        (f'{{"tokens": [{1 << 64}]}}', "body.tokens[0] is "), (f'{{"tokens": [{VOCAB}]}}', f"holds token {VOCAB}"),
        ('{"tokens": [1], "max_new_tokens": 0}', "body.max_new_tokens is 0"),
        ('{"tokens": [1], "max_new_tokens": 100}', "this cache takes up to 100 in all"),
        (json.dumps({"tokens": [5] * 200, "max_new_tokens": 1}), "this cache takes up to 100 in all")]
    for body, message in cases:
        status, answer = server.ask(body)
        assert (status, list(answer)) == (400, ["error"]), body[:80]
        assert message in answer["error"]
    assert server.ask("x", "GET", "/nowhere")[0] == 404
    assert server.ask(b" " * (17 << 20))[0] == 413
    assert server.ask(json.dumps(good)) == first
    assert server.end(signal.SIGINT) == (0, "")


def test_what_a_server_cannot_do_is_said_at_its_start(made: Export, serve: Callable[..., Server]) -> None:
    server = serve("sanitized")
    program = need_server("sanitized")
    for words, message in (([], "no folder given"), ([made.folder / "gone"], "no manifest.json"),
                           ([made.folder, "--contexts", "0"], "--contexts 0: expected 1 to 1024"),
                           ([made.folder, "--port", "x"], "--port x: expected 0 to 65535"),
                           ([made.folder, "--max-rows", "9999"], f"most is 9999 rows; expected 1 to {MAX_CONTEXT}"),
                           ([made.folder, "--port", server.port], f":{server.port} cannot be bound")):
        done = run(program, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
    assert run(program, "--help").stdout.startswith("usage: mla-server DIR")


def test_a_consumer_finds_the_installed_package(made: Export, tmp_path: Path) -> None:
    """Installed, the sources out of sight: find_package(mla), mla::mla, a program of a few lines."""
    compiled(lambda: cpp_toolchain.program("mla-generate"))
    installed = cpp_toolchain.install("release", tmp_path / "installed")
    assert {p.name for p in (installed / "include" / "mla").iterdir()} == {
        p.name for p in (cpp_toolchain.SOURCE / "include" / "mla").iterdir()}
    assert str(cpp_toolchain.REPOSITORY / "engines") not in "".join(
        p.read_text() for p in (installed / "lib").rglob("*.cmake"))
    source = tmp_path / "consumer"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(CONSUMER)
    (source / "main.cpp").write_text(MAIN)
    options = [o for o in cpp_toolchain.ort_options() if not o.startswith("-DCMAKE_PREFIX_PATH")]
    prefix = f"-DCMAKE_PREFIX_PATH={cpp_toolchain.debian() / 'usr'};{installed}"
    shutil.rmtree(cpp_toolchain.BUILD / "consumer", ignore_errors=True)  # it was another run's, of other sources
    program = cpp_toolchain.build("consumer", (*options, prefix, "-DCMAKE_BUILD_TYPE=Release"), "consumer", source)
    done = run(program, made.folder)
    assert list(map(int, done.stdout.split())) == in_python(made, [[1, 146, 46]], 5)[0]


def rtx_program() -> Path:
    return compiled(lambda: cpp_toolchain.build("rtx", tuple(cpp_toolchain.rtx_options()), "mla-generate"))


def test_the_tensorrt_side_compiles_links_and_says_that_nothing_ran(made: Export) -> None:
    """Warnings are errors in these builds, so that it exists says that it compiled clean and linked."""
    program = rtx_program()
    assert "libtensorrt_rtx.so.1" in subprocess.run(["ldd", str(program)], capture_output=True, text=True,
                                                    check=True).stdout
    done = run(program, made.folder, "--tokens", "1,2")
    if done.returncode == 0:
        pytest.skip("a CUDA device is here: what it answers is no matter of this test")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mla-generate: not run: no CUDA device (")
    assert run(program, "--help").returncode == 0


def test_engines_are_read_as_python_reads_them(tmp_path: Path) -> None:
    """Real TensorRT-RTX engines of both layouts: what serves what, in which profile, up to which sizes."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is an extra: pip install -e '.[rtx]'")
    made = export(ExportRequest(str(tiny_checkpoint(tmp_path / "checkpoint", "youtu")), tmp_path / "export",
                                max_context=MAX_CONTEXT, dtype="fp16", target="trt-rtx"))
    step = {"op": "engines", "folder": str(made.folder), "backend": "trt-rtx"}
    assert "no manifest.json; expected engines of trt-rtx; rebuild with: python -m engines build" in (
        scenario(step)[0]["error"])
    for layout in ("split", "unified"):
        build(BuildRequest(made.folder, backend="trt-rtx", layout=layout, chunk=64, prefill_batch=2, max_batch=3,
                           formulation="kqt", opt_search=False, overwrite=layout == "unified"))
        kept = open_engines(made, "trt-rtx")
        found = scenario(step)[0]
        assert found["builder"] == kept.data["builder"]
        expected = [{"engine": e.engine, "graph": e.graph, "file": e.file,
                     "serves": [{"kind": kind, "graph": graph, "limits": [p[name][2] for name in "BTS"]}
                                for (kind, graph), p in zip(e.serves.items(), e.profiles, strict=True)]}
                    for e in kept.engines if e.file]
        assert found["records"] == expected
        assert len(expected) == (1 if layout == "unified" else 2)
    manifest = kept.folder / "manifest.json"
    data = json.loads(manifest.read_text())
    for change, message in (({"engines_of": "0" * 64}, "built from another export"),
                            ({"backend": "trt"}, "expected trt-rtx"),
                            ({"options": data["options"] | {"strip": True}}, "built with strip; this library loads"),
                            ({"engines": [data["engines"][0] | {"profiles": []}]}, "expected as many kinds as"),
                            ({"engines": [data["engines"][0] | {"file": "../x"}]}, "a file that the manifest has a")):
        manifest.write_text(json.dumps(data | change))
        error = scenario(step)[0]["error"]
        assert message in error
        assert "python -m engines build" in error
