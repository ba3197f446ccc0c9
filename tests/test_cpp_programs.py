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
import sys
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

    def ask(self, body: str | bytes | Iterator[bytes], method: str = "POST", path: str = "/generate",
            kind: str = "application/json") -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body, {"Content-Type": kind})  # an iterator goes out in chunks
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


FORM = "application/x-www-form-urlencoded"  # what `curl -d` says of any body
LIMIT = 16 << 20


def test_a_body_is_read_whatever_it_calls_itself(serve: Callable[..., Server]) -> None:
    """As a form, of any size up to the server's own limit, in chunks; and what is refused hears the true reason."""
    server = serve("release", "--contexts", 1)
    text = json.dumps({"tokens": [5, 6, 7] * 100, "max_new_tokens": 4})
    expected = server.ask(text)
    assert expected[0] == 200
    for size in (len(text), 8192, 8193, 100_000, LIMIT):
        assert server.ask(text.ljust(size), kind=FORM) == expected, size
    many = json.dumps({"tokens": [5] * 5000})  # 15 KB, more than the model takes
    assert server.ask(many, kind=FORM) == server.ask(many)
    assert "this cache takes up to" in server.ask(many, kind=FORM)[1]["error"]
    assert server.ask(iter([text.encode(), b" " * 10_000]), kind=FORM) == expected
    large = "the body is larger than 16 MiB; send fewer tokens"
    for kind in (FORM, "application/json"):
        assert server.ask(text.ljust(LIMIT + 1), kind=kind) == (413, {"error": large})
        assert server.ask(iter([text.encode(), *[b" " * (1 << 20)] * 20]), kind=kind) == (413, {"error": large})
    assert server.ask("tokens=1,2,3", kind=FORM) == (
        400, {"error": 'the body is not JSON; send {"tokens": [1, 2, 3], "max_new_tokens": 16}'})
    parts = '--x\r\nContent-Disposition: form-data; name="tokens"\r\n\r\n1,2,3\r\n--x--\r\n'
    status, answer = server.ask(parts, kind="multipart/form-data; boundary=x")
    assert (status, answer["error"].partition(";")[0]) == (415, "the body is a multipart form")
    status, answer = server.ask(text.ljust(9000), path="/nowhere", kind=FORM)
    assert answer == {"error": "POST /nowhere: expected POST /generate or GET /health"}
    assert status >= 400
    assert server.ask(text) == expected
    assert server.end() == (0, "")


def test_curl_is_answered(tmp_path: Path, serve: Callable[..., Server]) -> None:
    if shutil.which("curl") is None:
        pytest.skip("not run: no curl here")
    server = serve("release", "--contexts", 1)
    body = tmp_path / "body.json"
    tokens = [100, 101, 102] * 150
    for size in (0, 9_000, 3 << 20):  # from a MiB on curl asks first whether it may go on
        body.write_text(json.dumps({"tokens": tokens, "max_new_tokens": 4}).ljust(size))
        done = run(Path("curl"), "-sS", f"localhost:{server.port}/generate", "-d", f"@{body}")
        assert (done.returncode, done.stderr) == (0, "")
        assert len(json.loads(done.stdout)["tokens"]) == 4
    body.write_text(" " * (17 << 20))
    done = run(Path("curl"), "-sS", f"localhost:{server.port}/generate", "-d", f"@{body}")
    assert json.loads(done.stdout)["error"].startswith("the body is larger than 16 MiB")


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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as `cmake --install` leaves it; its sources are elsewhere."""
    compiled(lambda: cpp_toolchain.program("mla-generate"))
    return cpp_toolchain.install("release", tmp_path_factory.mktemp("cpp") / "installed")


def option(name: str) -> str:
    """The value of one of the options that the builds here are configured with."""
    return next(o.partition("=")[2] for o in cpp_toolchain.ort_options() if o.startswith(f"-D{name}="))


def configured(source: Path, build: Path, *options: str, cwd: Path | None = None) -> tuple[int, str, dict[str, str]]:
    """CMake's exit status, what it said, in one line, and its cache."""
    done = subprocess.run(["cmake", "-S", str(source), "-B", str(build), *options], capture_output=True, text=True,
                          check=False, cwd=cwd)
    lines = (build / "CMakeCache.txt").read_text().splitlines() if (build / "CMakeCache.txt").is_file() else []
    pairs = (line.partition("=") for line in lines if line[:1].isalpha() and "=" in line)
    return (done.returncode, " ".join((done.stdout + done.stderr).split()),
            {name.partition(":")[0]: value for name, _, value in pairs})


def consumer(folder: Path, more: str = "") -> Path:
    """A project of a few lines over the package."""
    source = folder / "consumer"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(CONSUMER + more)
    (source / "main.cpp").write_text(MAIN)
    return source


def another_runtime(folder: Path) -> Path:
    """ONNX Runtime as its releases unpack: header and library in one folder."""
    (folder / "lib").mkdir(parents=True)
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (folder / "lib" / name).symlink_to(Path(option("ORT_ROOT")) / "lib" / name)
    (folder / "include").symlink_to(option("ORT_INCLUDE"))
    return folder


def test_installed_programs_find_their_library(made: Export, installed: Path) -> None:
    done = run(installed / "bin" / "mla-generate", made.folder, "--tokens", "1,146,46", "--max-new-tokens", 5)
    assert (done.returncode, done.stdout) == (0, ",".join(map(str, in_python(made, [[1, 146, 46]], 5)[0])) + "\n")
    dynamic = subprocess.run(["readelf", "-d", str(installed / "bin" / "mla-generate")], capture_output=True, text=True,
                             check=True).stdout
    assert f"{option('ORT_ROOT')}/lib" in next(line for line in dynamic.splitlines() if "PATH" in line)


def test_a_consumer_finds_the_installed_package(made: Export, installed: Path, tmp_path: Path) -> None:
    """The sources out of sight, and nothing said but where the package is: find_package(mla), mla::mla, a program of a
    few lines."""
    assert {p.name for p in (installed / "include" / "mla").iterdir()} == {
        p.name for p in (cpp_toolchain.SOURCE / "include" / "mla").iterdir()}
    assert str(cpp_toolchain.REPOSITORY / "engines") not in "".join(
        p.read_text() for p in (installed / "lib").rglob("*.cmake"))
    source = consumer(tmp_path)
    shutil.rmtree(cpp_toolchain.BUILD / "consumer", ignore_errors=True)  # it was another run's, of other sources
    program = cpp_toolchain.build("consumer", (f"-DCMAKE_PREFIX_PATH={installed}", "-DCMAKE_BUILD_TYPE=Release"),
                                  "consumer", source)
    done = run(program, made.folder)
    assert list(map(int, done.stdout.split())) == in_python(made, [[1, 146, 46]], 5)[0]


@pytest.mark.parametrize("project", ["library", "consumer"])
def test_the_runtime_can_be_chosen(project: str, installed: Path, tmp_path: Path) -> None:
    """By an ORT_ROOT from the folder that cmake is called in, in a build folder that had another before."""
    source = consumer(tmp_path) if project == "consumer" else cpp_toolchain.SOURCE
    prefix = installed if project == "consumer" else Path(option("CMAKE_PREFIX_PATH"))
    other, third = another_runtime(tmp_path / "other" / "ort"), another_runtime(tmp_path / "third")
    common = (f"-DCMAKE_PREFIX_PATH={prefix}", "-DMLA_BUILD_EXAMPLES=OFF")
    if project == "consumer":
        code, said, cache = configured(source, tmp_path / "build", *common)
        assert (code, cache["ORT_LIBRARY"]) == (0, f"{option('ORT_ROOT')}/lib/libonnxruntime.so"), said
    for root, word in ((other, "other/ort"), (third, str(third)), (other, "./other/../other/ort")):
        code, said, cache = configured(source, tmp_path / "build", *common, f"-DORT_ROOT={word}", cwd=tmp_path)
        assert code == 0, said
        assert (cache["ORT_LIBRARY"], cache["ORT_INCLUDE"]) == (f"{root}/lib/libonnxruntime.so", f"{root}/include")
    code, said, cache = configured(source, tmp_path / "build", *common, "-DORT_INCLUDE=third/include", cwd=tmp_path)
    assert (code, cache["ORT_INCLUDE"]) == (0, f"{third}/include"), said


def test_a_runtime_that_is_not_there_is_said(installed: Path, tmp_path: Path) -> None:
    """What arrived, what was expected, what to do: of the library's own build, and of a package whose runtime moved."""
    own, include = f"-DCMAKE_PREFIX_PATH={option('CMAKE_PREFIX_PATH')}", option("ORT_INCLUDE")
    code, said, _ = configured(cpp_toolchain.SOURCE, tmp_path / "own", own, f"-DORT_ROOT={tmp_path / 'none'}",
                               f"-DORT_INCLUDE={include}")
    expected = ("; expected onnxruntime_cxx_api.h in include/ and libonnxruntime.so in lib/ of one folder, as a "
                "release of ONNX Runtime unpacks; give -DORT_ROOT=DIR")
    state = f"ORT_INCLUDE is {include}, ORT_LIBRARY was not found, ORT_ROOT is {tmp_path / 'none'}"
    assert code == 1
    assert f"ONNX Runtime was not found ({state}){expected}" in said
    moved = Path(shutil.copytree(installed, tmp_path / "moved"))
    config = next(moved.rglob("mla-config.cmake"))
    config.write_text(config.read_text().replace(option("ORT_ROOT"), "/gone").replace(include, "/gone/include"))
    source = consumer(tmp_path)
    code, said, _ = configured(source, tmp_path / "build", f"-DCMAKE_PREFIX_PATH={moved}")
    assert code == 1
    assert ("ONNX Runtime was not found (ORT_INCLUDE was not found, ORT_LIBRARY was not found, ORT_ROOT is not given, "
            "this package was installed with /gone/include, this package was installed with "
            f"/gone/lib/libonnxruntime.so){expected}") in said
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\nproject(consumer CXX)\nfind_package(mla 0.1 QUIET)\n"
        'if(NOT mla_FOUND)\n  message(STATUS "goes on without")\nendif()\n')
    code, said, _ = configured(source, tmp_path / "optional", f"-DCMAKE_PREFIX_PATH={moved}")
    assert code == 0
    assert "goes on without" in said
    code, said, _ = configured(cpp_toolchain.SOURCE, tmp_path / "backend", own, "-DMLA_BACKEND=onnx")
    assert code == 1
    assert "MLA_BACKEND is 'onnx'; expected ort, trt or trt-rtx" in said


def test_the_command_that_validate_cpp_prints_builds(made: Export, tmp_path: Path) -> None:
    """Pasted into a shell it leaves the generator where it was missed, and the same command then has its figures."""
    compiled(lambda: cpp_toolchain.program("mla-generate"))  # so that the headers have been fetched
    words = [sys.executable, "-m", "validate", "cpp", str(made.folder), "--context", "9", "--new-tokens", "6",
             "--rounds", "1", "--generator", str(tmp_path / "a build" / "mla-generate")]
    missed = subprocess.run(words, capture_output=True, text=True, check=False, cwd=cpp_toolchain.REPOSITORY)
    assert missed.returncode == 2
    line = missed.stderr.partition("build it with: ")[2]
    pasted = subprocess.run(["bash", "-ec", line], capture_output=True, text=True, check=False,
                            cwd=cpp_toolchain.REPOSITORY)
    assert pasted.returncode == 0, f"{line}\n{pasted.stdout}\n{pasted.stderr}"
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=cpp_toolchain.REPOSITORY)
    assert done.returncode == 0, done.stderr


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
    assert "no manifest.json; expected engines of trt-rtx; make it with: python -m engines build" in (
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
