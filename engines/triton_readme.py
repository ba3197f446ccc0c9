"""The README of a model in a Triton repository: what it is, how to start the server, a client that generates."""

from __future__ import annotations

from typing import Any

from exporter.console import size
from exporter.manifest import Export, GraphEntry

_HEAD = """\
# {name}

{what}, for Triton's {backend} backend. Generated from the graph `{graph}`; {not_run}, so nothing below was tried.
`config.pbtxt` was checked: {checked}.

## Start

    docker run --rm {gpus}--net host --shm-size 1g -v "$PWD:/models" nvcr.io/nvidia/tritonserver:YY.MM-py3 \\
        tritonserver --model-repository=/models

from the folder that holds `{name}/`. {container}

## Use

{use}
"""
_STATEFUL = """\
Triton keeps each sequence's caches ({state} a sequence, up to {sequences} at a time; further ones wait). The client
numbers its sequences, sends new tokens alone, and counts: `past_lengths` is the number of tokens sent before. A
sequence that is silent for {idle} s loses its caches. A request is one sequence: Triton gathers a state for each, so
steps of several sequences run one after the other.
"""
_STATELESS = """\
The client holds the past: it sends `past_latent.i`, and writes the `new_latent.i` that come back behind it. Up to
{batch} sequences a request. On one machine keep the past in system or CUDA shared memory, or every request
carries it over the wire.
"""
_CLIENT = """
```python
import numpy as np
import tritonclient.grpc as triton  # pip install 'tritonclient[grpc]'

client, prompt, new_tokens, CHUNK = triton.InferenceServerClient("localhost:8001"), [1, 2, 3], 16, {chunk}


def tensor(name, values):
    given = triton.InferInput(name, list(values.shape), triton_type[values.dtype.name])
    given.set_data_from_numpy(values)
    return given


triton_type = {{"int64": "INT64", "float32": "FP32", "float16": "FP16", "int8": "INT8"}}
tokens, length = list(prompt), 0{past}
while len(tokens) < len(prompt) + new_tokens:
    ids = tokens[length:length + CHUNK]
    feed = {{"input_ids": [ids], "past_lengths": {length}{last}}}
    inputs = [tensor(name, np.array(values, np.int64)) for name, values in feed.items()]
{step}
    length += len(ids)
    if length == len(tokens):
        tokens.append(int(answer.as_numpy("logits")[0].argmax()))
print(tokens[len(prompt):])
```
"""
_STATE_STEP = """\
    final = length + len(ids) + 1 == len(prompt) + new_tokens
    answer = client.infer("{name}", inputs, sequence_id=1, sequence_start=length == 0, sequence_end=final)"""
_PAST = """
past = [np.zeros((1, 1, {rows}), np.{numpy})] * {attentions}  # an empty past is one row with length 0"""
_PAST_STEP = """\
    inputs += [tensor(f"past_latent.{{i}}", rows) for i, rows in enumerate(past)]
    answer = client.infer("{name}", inputs)
    new = [answer.as_numpy(f"new_latent.{{i}}") for i in range(len(past))]
    past = [np.concatenate([p, n], 1) if length else n for p, n in zip(past, new, strict=True)]"""


def readme(facts: dict[str, Any], entry: GraphEntry, export: Export) -> str:
    """Markdown. The client is there for what NumPy can send: a whole model, its cache in no bfloat16 and no parts."""
    stateful, trt = facts["stateful"], facts["backend"] == "tensorrt"
    use = (_STATEFUL if stateful else _STATELESS).format(state=size(facts["state_bytes"]), idle=_idle(facts),
                                                        sequences=facts["sequences"], batch=facts["max_batch_size"])
    what = "A whole model" if export.contract == "model" else "One attention"
    head = _HEAD.format(
        **{k: facts[k] for k in ("name", "backend", "graph", "not_run")}, use=use, checked="; ".join(facts["checked"]),
        what=f"{what} ({export.dtype}, up to {export.max_context} rows of past)", gpus="--gpus all " if trt else "",
        container="Its TensorRT must be the version that built the plan." if trt else
        "Its ONNX Runtime must know opset 24 (1.24 or newer).")
    notes = "".join(f"- {note}\n" for note in facts["notes"])
    return head + _client(facts, entry, export) + (f"\n## Before relying on it\n\n{notes}" if notes else "")


def _idle(facts: dict[str, Any]) -> str:
    return f"{facts['idle_seconds']:g}"


def _client(facts: dict[str, Any], entry: GraphEntry, export: Export) -> str:
    names = {s.name for s in (*entry.inputs, *entry.outputs)}
    past_given = "past_latent.0" in names
    if not {"input_ids", "logits"} <= names or (past_given and (export.dtype == "bf16" or export.quantised_cache)):
        return ""
    name, stateful = facts["name"], facts["stateful"]
    chunk = (facts["limits"] or {}).get("T", 512)
    numpy = {"fp32": "float32", "fp16": "float16"}.get(export.dtype, "")
    return _CLIENT.format(
        chunk=chunk, length="[[length]]", last=', "last_token": [[len(ids) - 1]]' if "last_token" in names else "",
        past="" if stateful else _PAST.format(rows=export.config.row_dim, numpy=numpy, attentions=export.attentions),
        step=(_STATE_STEP if stateful else _PAST_STEP).format(name=name))
