"""Triton's `config.pbtxt`: the model configuration of one graph or engine, written, read back strictly, and held
against the tensors that it is about.

Fields and rules are those of Triton's `model_config.proto` and of what its core checks at load time. With
`max_batch_size` N Triton adds the batch axis itself, so `dims` leave it out; a tensor that has no other axis is
declared [1] and reshaped to []. Two states are told apart by the order of their names alone (server issue 8586), so
inputs and outputs must sort alike.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from exporter.errors import CheckError, InputError
from exporter.manifest import GraphEntry
from exporter.signature import TensorSpec

TYPES = {"fp32": "TYPE_FP32", "fp16": "TYPE_FP16", "bf16": "TYPE_BF16", "int8": "TYPE_INT8", "int64": "TYPE_INT64"}
PLATFORMS = {"onnxruntime": ("onnxruntime_onnx", "model.onnx"), "tensorrt": ("tensorrt_plan", "model.plan")}
STATE = ("latent_cache.", "latent_cache_out.")  # in and out: the tensors that Triton may keep between requests

Message = dict[str, Any]
# the part of ModelConfig that is written here: a type's name for a scalar, a list of it where it is repeated
_RESHAPE = {"shape": ["int"]}
_TENSOR = {"name": "string", "data_type": "enum", "dims": ["int"], "reshape": _RESHAPE}
SCHEMA: Message = {
    "name": "string", "platform": "string", "backend": "string", "max_batch_size": "int", "input": [_TENSOR],
    "output": [_TENSOR], "default_model_filename": "string",
    "version_policy": {"latest": {"num_versions": "int"}},
    "instance_group": [{"count": "int", "kind": "enum", "profile": ["string"]}],
    "sequence_batching": {
        "max_sequence_idle_microseconds": "int",
        "oldest": {"max_candidate_sequences": "int"},
        "state": [{"input_name": "string", "output_name": "string", "data_type": "enum", "dims": ["int"],
                   "initial_state": [{"name": "string", "data_type": "enum", "dims": ["int"], "zero_data": "bool"}],
                   "use_same_buffer_for_input_output": "bool"}]}}


def tensor(spec: TensorSpec) -> Message:
    """An entry of `input` or `output`, its batch axis left to Triton."""
    dims = _dims(spec)
    named = {"name": spec.name, "data_type": _type(spec)}
    return named | ({"dims": dims} if dims else {"dims": [1], "reshape": {"shape": []}})


def state(given: TensorSpec, made: TensorSpec) -> Message:
    """A cache that Triton keeps: zeros at first, one buffer for both sides."""
    dims, kind = _dims(given), _type(given)
    return {"input_name": given.name, "output_name": made.name, "data_type": kind, "dims": dims,
            "initial_state": [{"name": f"{given.name} empty", "data_type": kind, "dims": dims, "zero_data": True}],
            "use_same_buffer_for_input_output": True}


def _dims(spec: TensorSpec) -> list[int]:
    return [d if isinstance(d, int) else -1 for d in spec.shape[1:]]


def _type(spec: TensorSpec) -> str:
    if spec.dtype not in TYPES:
        raise InputError(f"{spec.name} is {spec.dtype}, for which Triton has no type (it has {', '.join(TYPES)}); "
                         "export without --cache-dtype fp8")
    return TYPES[spec.dtype]


# --- text -------------------------------------------------------------------------------------------------------------


def text(message: Message, schema: Message = SCHEMA, indent: str = "") -> str:
    """Protobuf text of a message; fields in the order given."""
    lines = []
    for name, value in message.items():
        kind = schema[name]
        if isinstance(kind, dict):
            lines.append(f"{indent}{name} {{{_body(value, kind, indent)}}}")
        elif isinstance(kind, list) and isinstance(kind[0], dict):
            items = (f"{indent}  {{{_body(v, kind[0], indent + '  ')}}}" for v in value)
            lines.append(f"{indent}{name} [\n" + ",\n".join(items) + f"\n{indent}]")
        elif isinstance(kind, list):
            inner = "".join(f"{_scalar(v, kind[0])}, " for v in value)
            lines.append(f"{indent}{name}: [ {inner.removesuffix(', ')}{' ' if value else ''}]")
        else:
            lines.append(f"{indent}{name}: {_scalar(value, kind)}")
    return "\n".join(lines) + "\n"


def _body(message: Message, schema: Message, indent: str) -> str:
    inner = text(message, schema, indent + "  ")
    return f"\n{inner}{indent}" if message else " "


def _scalar(value: Any, kind: str) -> str:
    if kind == "string":
        return f'"{value}"'
    return str(value).lower() if kind == "bool" else str(value)


_TOKEN = re.compile(r'\s*(?:#[^\n]*\n\s*)*("[^"\\\n]*"|-?\d+|\w+|[][{}:,]|\S)')
_SCALARS = {"string": re.compile(r'"([^"]*)"'), "int": re.compile(r"(-?\d+)"), "bool": re.compile(r"(true|false)"),
            "enum": re.compile(r"([A-Z][A-Z0-9_]*)")}


class _Reader:
    """Reads what `text` writes, and the freedoms that the format allows; ValueError at anything else."""

    def __init__(self, source: str) -> None:
        self.tokens, self.at = _TOKEN.findall(source), 0

    def next(self, *expected: str) -> str:
        found = self.tokens[self.at] if self.at < len(self.tokens) else "the end"
        if expected and found not in expected:
            raise ValueError(f"{found} where {' or '.join(expected)} was expected")
        self.at += 1
        return str(found)

    def peek(self) -> str:
        return str(self.tokens[self.at]) if self.at < len(self.tokens) else ""

    def message(self, schema: Message, end: str) -> Message:
        made: Message = {}
        while self.peek() != end:
            name = self.next()
            if name not in schema:
                raise ValueError(f"unknown field {name}")
            kind = schema[name]
            repeated = isinstance(kind, list)
            if name in made and not repeated:
                raise ValueError(f"{name} is given twice")
            values = list(self.values(name, kind[0] if repeated else kind, repeated))
            made[name] = made.get(name, []) + values if repeated else values[0]
        if end:
            self.next(end)
        return made

    def values(self, name: str, kind: Any, repeated: bool) -> Iterator[Any]:
        colon = self.peek() == ":"
        if colon:
            self.next()
        elif not isinstance(kind, dict):
            raise ValueError(f"{name}: a colon is missing")
        if not (repeated and self.peek() == "["):
            yield self.value(name, kind)
            return
        self.next("[")
        while self.peek() != "]":
            yield self.value(name, kind)
            if self.peek() != "]":
                self.next(",")
                if self.peek() == "]":
                    raise ValueError(f"{name}: a comma before ]")
        self.next("]")

    def value(self, name: str, kind: Any) -> Any:
        if isinstance(kind, dict):
            self.next("{")
            return self.message(kind, "}")
        found = self.next()
        matched = _SCALARS[kind].fullmatch(found)
        if matched is None:
            raise ValueError(f"{name}: {found} is no {kind}")
        value = matched.group(1)
        return int(value) if kind == "int" else value == "true" if kind == "bool" else value


def parse(source: str) -> Message:
    """A message from its text; ValueError for a field that is unknown, doubled or of another type."""
    return _Reader(source).message(SCHEMA, "")


# --- checks -----------------------------------------------------------------------------------------------------------


def check(source: str, entry: GraphEntry) -> list[str]:
    """Hold a configuration's text against the graph that it is of; who judged it. CheckError names what is wrong."""
    try:
        config = parse(source)
    except ValueError as error:
        raise CheckError(f"config.pbtxt: {error}") from None
    wrong = [*_wrong_tensors(config, entry), *_wrong_states(config)]
    if wrong:
        raise CheckError(f"config.pbtxt does not suit {entry.name}: {'; '.join(wrong)}")
    return ["fields and types, by a strict parser", f"names, types and shapes, against {entry.name}",
            *_official_check(source)]


def _wrong_tensors(config: Message, entry: GraphEntry) -> Iterator[str]:
    states = config.get("sequence_batching", {}).get("state", [])
    for side, specs, given in (("input", entry.inputs, "input_name"), ("output", entry.outputs, "output_name")):
        stated = {m["name"]: m for m in config[side]} | {m[given]: m for m in states}
        if len(stated) != len(config[side]) + len(states):
            yield f"an {side} is named twice"
        for name in sorted(stated.keys() ^ {s.name for s in specs}):
            yield f"{side} {name} is {'not of the graph' if name in stated else 'missing'}"
        for spec in specs:
            found = stated.get(spec.name)
            if found is None:
                continue
            dims = found["reshape"]["shape"] if "reshape" in found else found["dims"]
            if (dims, found["data_type"]) != (_dims(spec), TYPES.get(spec.dtype)):
                yield f"{spec.name} is {found['data_type']} {dims}, the graph's is {spec.dtype} {list(spec.shape)}"
            if not found["dims"]:
                yield f"{spec.name} has no dims, which Triton refuses"


def _wrong_states(config: Message) -> Iterator[str]:
    batching = config.get("sequence_batching")
    if batching is None:
        return
    states = batching["state"]
    by_input, by_output = (sorted(states, key=lambda s: str(s[side])) for side in ("input_name", "output_name"))
    if by_input != by_output:
        yield "inputs and outputs of the states sort differently, Triton would swap them"
    for found in states:
        first = found["initial_state"][0]
        if -1 in first["dims"] or len(first["dims"]) != len(found["dims"]):
            yield f"{found['input_name']}: its first state has dims {first['dims']}"
    if config["max_batch_size"] != 1:
        yield "max_batch_size must be 1: Triton keeps a state for each sequence, not for a batch"


def official() -> tuple[Any, str] | None:
    """Triton's own protobuf classes, from the package `tritonclient` where it is installed, and its version.

    The module is loaded by its file: the package's door wants gRPC, which a check of text does not.
    """
    package = importlib.util.find_spec("tritonclient")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    if not path.is_file() or spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, version("tritonclient")


def _official_check(source: str) -> Sequence[str]:
    found = official()
    if found is None:
        return ["not checked by Triton's own definition: the package tritonclient is not installed"]
    from google.protobuf import text_format

    module, release = found
    try:
        text_format.Parse(source, module.ModelConfig())
    except text_format.ParseError as error:
        raise CheckError(f"config.pbtxt: tritonclient {release}'s ModelConfig refuses it: {error}") from None
    return [f"by Triton's own ModelConfig, tritonclient {release}"]


def model_config(name: str, backend: str, entry: GraphEntry, *, max_batch: int, sequences: int, idle_seconds: float,
                 profiles: Sequence[int] = (), device: str = "auto") -> Message:
    """The configuration of one graph or plan. A scatter cache becomes implicit state of `sequences` sequences at a
    time, which lose it after `idle_seconds` without a request; any other graph is stateless, of up to `max_batch`."""
    platform, file = PLATFORMS[backend]
    states = [state(s, next(o for o in entry.outputs if o.name == s.name.replace(*STATE))) for s in entry.inputs
              if s.name.startswith(STATE[0])]
    group: Message = {"count": 1} | ({} if device == "auto" else {"kind": f"KIND_{device.upper()}"})
    made: Message = {
        "name": name, "platform": platform, "backend": backend, "max_batch_size": 1 if states else max_batch,
        "default_model_filename": file,
        "input": [tensor(s) for s in entry.inputs if not s.name.startswith(STATE[0])],
        "output": [tensor(s) for s in entry.outputs if not s.name.startswith(STATE[1])],
        "version_policy": {"latest": {"num_versions": 1}},
        "instance_group": [group | ({"profile": [str(p) for p in profiles]} if profiles else {})]}
    if states:
        made["sequence_batching"] = {"max_sequence_idle_microseconds": int(1e6 * idle_seconds),
                                     "oldest": {"max_candidate_sequences": sequences}, "state": states}
    return made


def described(config: Mapping[str, Any]) -> list[list[str]]:
    """Rows for people: tensor, who holds it, dims, type."""
    rows = [[m["name"], f"the client's {side}", str(m["dims"]), m["data_type"]] for side in ("input", "output")
            for m in config[side]]
    return rows + [[m["input_name"], "Triton's state", str(m["dims"]), m["data_type"]]
                   for m in config.get("sequence_batching", {}).get("state", [])]
