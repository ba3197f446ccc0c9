"""Polygraphy over an export: inputs and float64 goldens in its own files, its runs and conversions, lines for a GPU.

The folder that comes out serves Polygraphy's users without this toolkit; what ran here is in its script as it ran. It
holds a copy of the comparator (polygraphy_compare.py) and its tolerances. Polygraphy 0.53 exits with 0 although a
golden lacks a whole iteration, so an exit status of 0 counts only together with a line of success for every output of
every case.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from engines import trt
from engines.build_request import BuildRequest
from engines.lint import lint
from engines.search import OPT_CONTEXT, ranges
from engines.session import external_places
from exporter import formulations
from exporter.dtypes import NUMPY_OF_NAME
from exporter.errors import InputError
from exporter.formulations import BY_NAME
from exporter.manifest import Export, GraphEntry, open_export
from exporter.output import new_folder
from exporter.signature import NO_CACHE, Range, profile
from validate import model_parity, polygraphy_compare, quantised_weights
from validate.ladder import check_source
from validate.model_traces import Examiner
from validate.polygraphy_cases import BATCH, Case, ModelCases, make_cases
from validate.polygraphy_compare import REFERENCE
from validate.polygraphy_compare import TOLERANCES as TOLERANCES_FILE
from validate.quantised_weights import meant_attention
from validate.references import load_tensors
from validate.traces import TraceMaker

Progress = Callable[..., None]
SCRIPT = "commands.sh"
COMPARATOR = "mla_compare.py"
NO_TF32 = "no_tf32.py"
RTX = "POLYGRAPHY_USE_TENSORRT_RTX"
# `python -m polygraphy` does not exist, and the script `polygraphy` may not be on the PATH of this interpreter
TOOL = (sys.executable, "-c", "import sys; from polygraphy.tools import main; sys.exit(main())")

_NO_TF32_TEXT = '''"""Polygraphy leaves TF32 on for TensorRT-RTX: 10-bit mantissas miss fp32's tolerance."""

import tensorrt_rtx as trt


def postprocess_config(builder, network, config):
    config.clear_flag(trt.BuilderFlag.TF32)
'''
_SCRIPT_HEAD = f'''#!/bin/sh
# usage: sh {SCRIPT} [onnxrt|convert|trt-rtx|trt]: the Polygraphy commands of one runner, or all of them
# `trt-rtx` and `trt` need a CUDA device. Exit status 1 if any command failed.
only="${{1:-all}}"
case "$only" in all|onnxrt|convert|trt-rtx|trt) ;; *) sed -n 2,3p "$0" >&2; exit 2 ;; esac
cd "$(dirname "$0")" || exit 2
want() {{ [ "$only" = all ] || [ "$only" = "$1" ]; }}
failed=0
'''
_GRAPH_CHECK = ('  [ -f "$graph" ] || { echo "error: $graph is not there; this folder belongs beside the graphs of its '
                'export, move both together" >&2; exit 2; }')


@dataclass(frozen=True)
class Command:
    """One Polygraphy command line. `runner` is onnxrt, convert, trt-rtx or trt; paths are relative to `folder`."""

    graph: str
    runner: str
    args: tuple[str, ...]
    folder: Path
    status: str

    @property
    def line(self) -> str:
        """For a shell in the folder."""
        return f"{RTX}=1 " * (self.runner in ("convert", "trt-rtx")) + shlex.join(["polygraphy", *self.args])

    def to_dict(self) -> dict[str, str]:
        """JSON form; `line` is for a shell anywhere."""
        return {"graph": self.graph, "runner": self.runner, "status": self.status,
                "line": f"cd {shlex.quote(str(self.folder))} && {self.line}"}


@dataclass(frozen=True)
class Verdict:
    """One graph's outcome; `note` is Polygraphy's own line where it failed."""

    graph: str
    passed: bool
    note: str

    def to_dict(self) -> dict[str, Any]:
        """JSON form: `pass` for `passed`."""
        data = asdict(self)
        data["pass"] = data.pop("passed")
        return data


@dataclass(frozen=True)
class GraphRun(Verdict):
    """What `polygraphy run` said. `counted` is False where the runtime cannot judge this dtype."""

    dtype: str
    runner: str
    cases: int
    counted: bool


@dataclass(frozen=True)
class Converted(Verdict):
    """What `polygraphy convert` made; `file` is None where it failed."""

    file: str | None
    plan_bytes: int


@dataclass(frozen=True)
class Result:
    """Everything of one run. `commands` holds those that ran and those for a GPU, each with its status."""

    folder: Path
    graphs: tuple[GraphRun, ...]
    converted: tuple[Converted, ...]
    not_run: tuple[str, ...]
    commands: tuple[Command, ...]

    @property
    def passed(self) -> bool:
        """Every counted run and every conversion passed, and there was at least one."""
        verdicts = [g.passed for g in self.graphs if g.counted] + [c.passed for c in self.converted]
        return bool(verdicts) and all(verdicts)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"pass": self.passed, "folder": str(self.folder), "graphs": [g.to_dict() for g in self.graphs],
                "converted": [c.to_dict() for c in self.converted], "not_run": list(self.not_run),
                "commands": [c.to_dict() for c in self.commands]}


def _portable(array: np.ndarray, bf16: bool) -> Any:
    """NumPy's file format loses bfloat16, and Polygraphy answers in torch as soon as one input is torch: so all are."""
    array = np.ascontiguousarray(array)
    if not bf16:
        return array
    is_bf16 = array.dtype == ml_dtypes.bfloat16
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if is_bf16 else torch.from_numpy(array)


@dataclass(frozen=True)
class Job:
    """One graph: its files in `folder` (which will be `home`), its arguments, its runs."""

    made: Export
    graph: GraphEntry
    cases: Sequence[Case]
    folder: Path
    home: Path

    def file(self, what: str) -> str:
        """Name of the file of `inputs` (feeds) or `golden` (the reference's outputs)."""
        return f"{what}.{self.graph.name}.json"

    @property
    def model(self) -> str:
        """Relative where `home` lies inside the export and moves with it; the weights are found beside the graph."""
        path = self.made.folder.resolve() / self.graph.file
        return os.path.relpath(path, self.home) if self.home.is_relative_to(path.parent) else str(path)

    def write(self) -> None:
        """Write both files; goldens are rounded to the dtypes that the graph declares."""
        from polygraphy.comparator import IterationResult, RunResults
        from polygraphy.json import save_json
        from polygraphy.logger import G_LOGGER

        bf16 = self.made.dtype == "bf16"
        dtypes = {t.name: NUMPY_OF_NAME[t.dtype] for t in self.graph.outputs}
        with G_LOGGER.verbosity(G_LOGGER.ERROR):  # it logs to stdout, which belongs to the command's one JSON object
            save_json([{n: _portable(a, bf16) for n, a in c.feed.items()} for c in self.cases],
                      str(self.folder / self.file("inputs")))
            rounded = [{n: _portable(c.golden[n].astype(d), bf16) for n, d in dtypes.items()} for c in self.cases]
            RunResults([(REFERENCE, [IterationResult(r, runner_name=REFERENCE) for r in rounded])]).save(
                str(self.folder / self.file("golden")))

    def compare_args(self) -> list[str]:
        """The files, and who compares them."""
        return ["--load-inputs", self.file("inputs"), "--load-outputs", self.file("golden"),
                "--compare-func-script", COMPARATOR]

    def _limits(self) -> dict[str, Range]:
        """The profile of `engines build`, widened to the cases' batch and cut to OPT_CONTEXT rows, where every preset's
        scores stay below the 2^31 elements past which the builder misreports."""
        return ranges(self.made, self.graph, BuildRequest(
            self.made.folder, max_batch=max(BATCH, int(self.made.data["max_batch"])), prefill_batch=BATCH,
            max_context=min(OPT_CONTEXT, self.made.max_context)))

    def shape_args(self) -> list[str]:
        """The optimisation profile."""
        shapes = profile(self.graph.inputs, self._limits())
        args = []
        for i, which in enumerate(("min", "opt", "max")):
            args += [f"--trt-{which}-shapes", *[f"{n}:[{','.join(map(str, s[i]))}]" for n, s in shapes.items()]]
        return args

    def refused(self, target: str) -> str:
        """Why a target cannot take this graph; empty if it can."""
        if refused := formulations.refused(self.graph.formulation, target, self.made.dtype):
            return refused
        if self.made.data.get("experts", {}).get("forms", {}).get(self.graph.name) == "fused":
            return (f"its experts are ONNX Runtime's own operator, which {target} does not know; export with --target "
                    f"{target}")
        found = lint(self.made.folder / self.graph.file, {name: r.max for name, r in self._limits().items()})
        return "; ".join(f"[{f.rule}] {f.node}: {f.message}" for f in found)

    def command(self, runner: str, status: str = "run") -> Command:
        """The command line of a runner."""
        # strongly typed: the graph's dtypes hold. TensorRT-RTX always is; plain TensorRT 10 has to be told
        build = ["--strongly-typed"]
        if runner in ("convert", "trt-rtx") and self.made.dtype == "fp32":
            build += ["--trt-config-postprocess-script", NO_TF32]
        build += self.shape_args() if runner != "onnxrt" else []
        args = {"onnxrt": ["run", self.model, "--onnxrt", *self.compare_args()],
                "convert": ["convert", self.model, "--convert-to", "trt", "-o", f"{self.graph.name}.engine", *build],
                }.get(runner, ["run", self.model, "--trt", *self.compare_args(), *build])
        return Command(self.graph.name, runner, tuple(args), self.home, status)

    def run_onnxrt(self, command: Command) -> GraphRun:
        """Passes if the exit status is 0 and every output of every case was compared and found good."""
        code, log = _polygraphy(command, self.folder)
        good = {t.name: log.count(f"PASSED | Output: '{t.name}'") for t in self.graph.outputs}
        passed = code == 0 and all(n == len(self.cases) for n in good.values())
        counted = self.made.dtype == "fp32"
        note = "" if counted else f"not counted: ONNX Runtime's CPU computes {self.made.dtype} products in fp32"
        if code:
            note = _reason(log)
        elif not passed:
            found = ", ".join(f"{name} {n} times" for name, n in good.items())
            note = f"exit status 0, but over {len(self.cases)} cases it passed only {found}: see {self.file('golden')}"
        return GraphRun(self.graph.name, passed, note, self.made.dtype, "onnxrt", len(self.cases), counted)

    def convert(self, command: Command) -> Converted:
        """An engine that ignores an input computes something else: a failure, and not kept."""
        code, log = _polygraphy(command, self.folder)
        plan = self.folder / f"{self.graph.name}.engine"
        unused = re.findall(r"Unused Input: .*", log, re.IGNORECASE)
        if code == 0 and plan.is_file() and not unused:
            return Converted(self.graph.name, True, "", plan.name, plan.stat().st_size)
        plan.unlink(missing_ok=True)
        return Converted(self.graph.name, False, unused[0] if unused else _reason(log), None, 0)


def _polygraphy(command: Command, folder: Path) -> tuple[int, str]:
    """Exit status and everything it printed, in order."""
    environment = {k: v for k, v in os.environ.items() if k != RTX} | {"PYTHONUNBUFFERED": "1"}
    if command.runner == "convert":
        environment[RTX] = "1"
    done = subprocess.run([*TOOL, *command.args, "--log-format", "no-colors"], cwd=folder, env=environment, text=True,
                          errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          check=False)
    return done.returncode, done.stdout


def _reason(log: str) -> str:
    """The last mismatch, else the last error, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["Polygraphy printed nothing"]
    mismatches = [line for line in lines if "FAILED | Output" in line]
    if mismatches:
        return re.sub(r"^\[[EI]\]\s*", "", mismatches[-1])
    # [E] is the library's own reason where there is one, [!] Polygraphy's; its tracebacks are [E] too
    errors = [line for line in lines if line.startswith("[E]") and not re.search(r'FAILED \| Runtime|File "', line)]
    critical = [line for line in lines if line.startswith("[!]")]
    return "; ".join(line[3:].strip() for line in [*errors[-1:], *critical[-1:]]) or lines[-1]


def _script(commands: Sequence[Command], models: Sequence[str]) -> str:
    lines = [f"want {c.runner} && {{ {c.line} || failed=1; }}" for c in commands]
    graphs = " ".join(shlex.quote(model) for model in dict.fromkeys(models))
    return _SCRIPT_HEAD + "\n".join([f"for graph in {graphs}; do", _GRAPH_CHECK, "done", *lines, "exit $failed"]) + "\n"


def _check(folder: Path, seed: int) -> Export:
    if importlib.util.find_spec("polygraphy") is None:
        raise InputError("Polygraphy is not installed; install it with: pip install -e '.[polygraphy]' in the "
                         "toolkit's checkout")
    if seed < 0:
        raise InputError(f"--seed {seed}: expected a number from 0 up")
    made = open_export(folder)
    if made.quantised_cache:
        raise InputError(f"{folder}: its cache is in {made.cache_dtype}; Polygraphy compares every code, and sound "
                         "graphs round to different ones at ties: run `python -m validate parity` and `network`, or "
                         "export without --cache-dtype")
    check_source(made)
    places = external_places(made)  # refuses an export without weights
    if places:
        raise InputError(f"{folder}: its weights lie in {next(iter(places.values()))}, where Polygraphy will not look; "
                         "export with --weights copy")
    return made


def run(folder: Path, out: Path | None = None, seed: int = 0,
        progress: Progress = lambda message, share=None: None) -> Result:
    """Write, run and convert every graph of an export; the files go to `out` (default: DIR/polygraphy).

    A failed graph is a result with `passed` False; InputError is for bad input and a missing Polygraphy.
    """
    made = _check(folder, seed)
    home = out or made.folder / "polygraphy"
    home = home.parent.resolve() / home.name
    progress(f"reference: {made.dtype} {made.cache}")
    cases, left_out = _cases(made, seed)
    with new_folder(home, overwrite=True, marker=SCRIPT) as partial:
        jobs = [Job(made, g, cases[g.kind], partial, home) for g in made.graphs if cases[g.kind]]
        if made.dtype == "fp32":
            (partial / NO_TF32).write_text(_NO_TF32_TEXT, encoding="utf-8")
        for job in jobs:
            job.write()
        write_comparator(partial, made)
        result = _run_jobs(jobs, home, progress)
        result = replace(result, not_run=(*left_out, *result.not_run))
        (partial / SCRIPT).write_text(_script(result.commands, [job.model for job in jobs]),
                                      encoding="utf-8")
    return result


def write_comparator(folder: Path, made: Export) -> None:
    """The comparator that the commands name, and the tolerance of every output of every graph."""
    shutil.copyfile(polygraphy_compare.__file__, folder / COMPARATOR)
    tolerance = asdict((model_parity if made.contract == "model" else quantised_weights).tolerance_of(made, "ort"))
    outputs = dict.fromkeys(t.name for g in made.graphs for t in g.outputs)
    (folder / TOLERANCES_FILE).write_text(
        json.dumps({"dtype": made.dtype, "outputs": dict.fromkeys(outputs, tolerance)}, indent=1) + "\n",
        encoding="utf-8")


def _cases(made: Export, seed: int) -> tuple[dict[str, list[Case]], list[str]]:
    """The cases of each kind of graph, and those that were left out."""
    kinds = dict.fromkeys(g.kind for g in made.graphs)
    if made.contract == "model":
        maker = ModelCases(made, Examiner(made, made.decoder, seed))
        return {kind: maker.make(made.graph(kind)) for kind in kinds}, maker.left_out
    tensors = meant_attention(made, load_tensors(made.data["source"], made.config))
    layer = TraceMaker(made.config, tensors, max_context=made.max_context, dtype=made.dtype, seed=seed,
                       causal=made.cache != NO_CACHE)
    return {kind: make_cases(made, layer, kind) for kind in kinds}, []


def _run_jobs(jobs: Sequence[Job], home: Path, progress: Progress) -> Result:
    runs: list[GraphRun] = []
    converted: list[Converted] = []
    not_run: list[str] = []
    commands: list[Command] = []
    builds = trt.available("trt-rtx")
    gpu = "not run: a CUDA device is here, run it yourself" if torch.cuda.is_available() else "not run: no CUDA device"
    for job in jobs:
        name, dtype = job.graph.name, job.made.dtype
        if dtype == "bf16":
            not_run.append(f"onnxrt, {name}: not run: ONNX Runtime's CPU has no bfloat16 Gemm or MatMul")
        elif BY_NAME[job.graph.formulation].operator:
            not_run.append(f"onnxrt, {name}: not run: Polygraphy loads no library of operators, and it has "
                           "mla::LatentAttention; `validate parity` runs it")
        else:
            progress(f"polygraphy run: {name}")
            commands.append(job.command("onnxrt"))
            runs.append(job.run_onnxrt(commands[-1]))
        refused = job.refused("trt-rtx")
        if refused:
            not_run.append(f"convert, {name}: not run: {refused}")
        else:
            command = job.command("convert", "run" if builds else "not run: tensorrt_rtx is not installed")
            commands.append(command)
            if builds:
                progress(f"polygraphy convert: {name}")
                converted.append(job.convert(command))
            else:
                not_run.append(f"convert, {name}: {command.status}; install it with: pip install -e '.[rtx]'")
        commands += [job.command(target, gpu) for target in ("trt-rtx", "trt") if not job.refused(target)]
    for target in ("trt-rtx", "trt"):
        if any(c.runner == target for c in commands):
            not_run.append(f"{target}: {gpu}; on one with it: sh {shlex.quote(str(home / SCRIPT))} {target}")
    return Result(home, tuple(runs), tuple(converted), tuple(not_run), tuple(commands))
