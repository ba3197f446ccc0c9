"""`python -m engines serve` as a person meets it: what it says, its page in a browser, its end, its documentation."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engines.serving.server import ServeOptions
from exporter.errors import InputError
from tests.live_server import NAME, REPOSITORY, LiveServer, make_model, serving

PAGE = REPOSITORY / "docs" / "serving.md"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def complete(url: str, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{url}/v1/completions", json={"model": NAME, "prompt": [5, 6], "temperature": 0, **body},
                       timeout=60)


def test_from_start_to_sigterm(model: Path) -> None:
    with serving(model, MLA_API_KEY="sesame") as (process, said):
        assert said["model"] == NAME
        assert said["key"] is True
        assert said["max_context"] == 600
        assert said["cache_budget"] == 20_000_000
        url = said["url"]
        assert complete(url, max_tokens=1).status_code == 401
        asked: dict[str, Any] = {}

        def ask() -> None:
            asked["answer"] = httpx2.post(f"{url}/v1/completions", timeout=60, headers={
                "Authorization": "Bearer sesame"}, json={"model": NAME, "prompt": [5, 6], "temperature": 0,
                                                         "max_tokens": 590, "ignore_eos": True})

        thread = threading.Thread(target=ask)
        thread.start()
        while not httpx2.get(f"{url}/status.json").json()["running"]:
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert asked["answer"].json()["usage"]["completion_tokens"] == 590  # it was finished
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "", "")


def test_the_end_of_patience(model: Path) -> None:
    with serving(model, "--drain-timeout", "0") as (process, said):
        with httpx2.stream("POST", f"{said['url']}/v1/completions", timeout=60, json={
                "model": NAME, "prompt": [5, 6], "max_tokens": 590, "ignore_eos": True, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            left = [line for line in lines if line]
        error = json.loads(left[-1].removeprefix("data: "))["error"]
        assert (error["code"], error["message"]) == (
            "refused", "the server is stopping; ask another one, or try again later")
        assert process.wait(30) == 0


@pytest.mark.parametrize(("options", "said"), [
    ({"max_concurrent": 0}, "--max-concurrent 0: expected at least 1"), ({"chunk": 0}, "--chunk 0: expected at least"),
    ({"max_queue": -1}, "--max-queue -1: expected 0 or more"), ({"max_body": 0.0}, "--max-body 0: expected more than"),
    ({"cache_budget": 10, "prefix_budget": 11}, r"--prefix-budget 11: prefixes are part of the latent cache, which has "
     r"10 MB in all \(--cache-budget\); expected at most that; lower it, or raise --cache-budget"),
    ({"prefix_budget": 1e9}, r"MB in all \(by default a quarter of the memory that is free\)"),
    ({"request_timeout": float("nan")}, "--request-timeout nan: expected more than 0"),
    ({"drain_timeout": -1.0}, "--drain-timeout -1: expected 0 or more")])
def test_options_are_refused_by_name(model: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ServeOptions(model, **options).limits(1 << 30)


def refused(words: list[str], **environment: str) -> str:
    done = subprocess.run([sys.executable, "-m", "engines", "serve", *words], cwd=REPOSITORY, capture_output=True,
                          text=True, timeout=60, env={**os.environ, **environment})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr


def test_bad_input(model: Path, tmp_path: Path) -> None:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = str(taken.getsockname()[1])
    for words, said in (
            ([str(model), "--port", port], f"--port {port}: Address already in use; choose another address"),
            ([str(model), "--port", "70000"], "--port 70000: expected 0 (any that is free) to 65535"),
            ([str(model), "--cache-budget", "9", "--prefix-budget", "9.5"], "--prefix-budget 9.5: prefixes are part"),
            ([str(model), "--cache-budget", "0.01"], "--cache-budget: 0.01 MB; the shortest sequence takes"),
            ([str(tmp_path)], "no manifest.json"), ([str(model), "--threads", "-1"], "--threads -1: expected 0")):
        assert said in refused(words)
    assert "the environment variable MLA_API_KEY is empty; set it to a key" in refused([str(model)], MLA_API_KEY=" ")
    for name in ("NOT_SET", ""):
        assert refused([str(model), "--api-key-env", name], MLA_API_KEY="sesame") == (
            f"error: --api-key-env {name}: this environment variable is not set; expected one with the key; export it, "
            "or leave the option out to serve without a key\n")


def test_where_the_key_comes_from(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLA_API_KEY", "OTHER"):
        monkeypatch.delenv(name, raising=False)
    assert ServeOptions(model).key is None
    with pytest.raises(InputError, match="--api-key-env MLA_API_KEY: this environment variable is not set"):
        _ = ServeOptions(model, api_key_env="MLA_API_KEY").key
    monkeypatch.setenv("MLA_API_KEY", " sesame ")
    assert ServeOptions(model).key == "sesame"
    monkeypatch.setenv("OTHER", "other")
    assert ServeOptions(model, api_key_env="OTHER").key == "other"


STOPPED_AT = """
import os, signal, sys
from importlib import import_module
from exporter import console
from engines.__main__ import cli

place, name, number = sys.argv.pop(1), sys.argv.pop(1), int(sys.argv.pop(1))
def stop():
    os.kill(os.getpid(), number)
class Finder:
    def find_spec(self, module, *rest):
        if module == place and not name:
            try:
                stop()
            except BaseException:  # as an import or a destructor may lose it
                pass
if name:
    holder = import_module(place)
    *owners, last = name.split(".")
    for owner in owners:
        holder = getattr(holder, owner)
    kept = getattr(holder, last)
    def stopped(*arguments, **options):
        stop()
        return kept(*arguments, **options)
    setattr(holder, last, stopped)
sys.meta_path.insert(0, Finder())
console.main(cli, "python -m engines")
"""


@pytest.mark.parametrize(("moment", "as_json"), [*((moment, False) for moment in (
    "uvicorn ", "engines.serving.server open_export", "engines.model_sessions ModelSessions.open",
    "engines.serving.worker Worker.__enter__", "asyncio run", "engines.serving.server _on_signals",
    "engines.serving.server _drain", "engines.serving.worker Worker.__exit__")),
    ("engines.model_sessions ModelSessions.open", True), ("engines.serving.server _drain", True)])
def test_sigterm_at_any_moment_is_a_good_end(moment: str, as_json: bool, model: Path) -> None:
    """The process sends itself the signal at that moment; from `_drain` on, for a second time."""
    words = ["serve", str(model), "--port", "0", "--threads", "1", *(["--json"] if as_json else [])]
    process = subprocess.Popen([sys.executable, "-c", STOPPED_AT, *moment.split(" "), str(int(signal.SIGTERM)), *words],
                               cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    late = moment.endswith(("_drain", "__exit__"))
    assert process.stdout is not None
    assert process.stderr is not None
    if late:
        said = (process.stdout if as_json else process.stderr).readline()
        assert "http://127.0.0.1:" in said
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    if late:
        assert (out, err.endswith("stopped\n")) == ("", not as_json)
    else:
        assert (out, err) == (('{"stopped": "before it listened"}\n', "") if as_json else
                              ("", "stopped before it listened\n"))


def test_without_its_extra(model: Path) -> None:
    code = ("import sys\nsys.modules['uvicorn'] = None\nfrom engines.__main__ import cli\n"
            "from exporter import console\n"
            f"sys.argv = ['engines', 'serve', {str(model)!r}]\nconsole.main(cli, 'python -m engines')")
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (
        2, "", "error: serve needs the package uvicorn; install it with: pip install -e '.[serve]'\n")


# --- The page ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_in_a_browser(model: Path) -> None:
    from playwright.sync_api import expect, sync_playwright

    with LiveServer(model, slowed=0.03) as server, sync_playwright() as play:
        threads = [threading.Thread(target=server.complete, kwargs={"max_tokens": 250, "ignore_eos": True})
                   for _ in range(3)]
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 900})
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        for thread in threads:
            thread.start()
        page.goto(f"{server.url}/")
        expect(page.locator("#running")).to_have_text("3 of 8", timeout=30_000)
        expect(page.locator("#rate")).to_have_text(re.compile(r"^(?!0\.0$)[\d.]+$"), timeout=30_000)
        assert page.inner_text("#model") == NAME
        assert page.locator("#rows tr").count() == 3
        assert page.locator("#bar i").first.bounding_box()["width"] > 0  # type: ignore[index]
        # a page that has just been opened knows what was before it
        page.wait_for_function("document.querySelector('#chart path:last-child').getBBox().height > 10")
        for width, scheme in ((w, s) for w in (360, 390, 768, 1280) for s in ("light", "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            assert page.locator("html").evaluate("e => e.scrollWidth <= innerWidth"), f"{width} px scrolls sideways"
            cut = page.locator("section, .card, td, th").evaluate_all(
                "all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)")
            assert cut == [], f"{width} px"
            assert page.locator("#chart path").last.evaluate("e => e.getBBox().width") > 550
            if folder := os.environ.get("SERVING_PICTURES"):
                page.screenshot(path=f"{folder}/status-{width}-{scheme}.png", full_page=True)
        for thread in threads:
            thread.join()
        expect(page.locator("#running")).to_have_text("0 of 8", timeout=30_000)
        assert page.is_visible("#none")
        assert problems == []
        assert {url.removeprefix(server.url) for url in asked if not url.startswith("data:")} == {"/", "/status.json"}
        browser.close()


# --- The documentation ------------------------------------------------------------------------------------------------


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def settled(text: str) -> str:
    """Without what differs from run to run: ids, times, the port."""
    text = re.sub(r'"(id|created)": ?("[a-z]+-[0-9a-f]+"|\d+)', r'"\1": …', text)
    return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:8000", text).strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl is installed")
@pytest.mark.parametrize(("page", "least"), [(PAGE, 4), (REPOSITORY / "README.md", 1)], ids=["serving", "README"])
def test_transcripts_of_the_documentation(page: Path, least: int, model: Path) -> None:
    """What the page shows is what is printed: commands after `$`, their output behind them, and the client's."""
    with LiveServer(model, key="sesame") as server:
        transcript, = blocks(page, "console")
        commands = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", transcript, re.MULTILINE)
        assert len(commands) >= least
        for command, shown in commands:
            done = subprocess.run(["bash", "-c", command.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")],
                                  capture_output=True, text=True, timeout=60, env={**os.environ, "KEY": "sesame"})
            assert settled(done.stdout) == settled(shown), command
        program, = (block for block in blocks(page, "python") if "openai" in block)
        printed, = blocks(page, "text")
        done = subprocess.run([sys.executable, "-c", program.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")],
                              capture_output=True, text=True, timeout=60, env={**os.environ, "KEY": "sesame"})
        assert (done.stdout, done.stderr) == (printed, "")


def test_every_option_is_in_the_documentation() -> None:
    from engines.serve_command import serve

    text = PAGE.read_text(encoding="utf-8")
    for option in serve.params:
        name = option.opts[0]
        assert not name.startswith("--") or name in ("--json",) or f"`{name}" in text, name
