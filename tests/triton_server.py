"""What Triton makes of a model repository, as its documentation and core say, over ONNX Runtime: enough of the server
and of `tritonclient.grpc` to run the client of a generated README.

Only `config.pbtxt` and the files beside it are read. States begin as stated, are kept by sequence, and are paired by
the order of their names, as the core does; a wrong configuration therefore gives wrong tokens here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from engines.triton_config import parse

TYPES = {"TYPE_FP32": ("FP32", np.float32), "TYPE_FP16": ("FP16", np.float16), "TYPE_INT64": ("INT64", np.int64)}


class InferInput:
    def __init__(self, name: str, shape: list[int], datatype: str) -> None:
        self.name, self.shape, self.datatype = name, shape, datatype

    def set_data_from_numpy(self, values: np.ndarray) -> None:
        assert list(values.shape) == self.shape
        self.values = values


class Answer:
    def __init__(self, outputs: dict[str, np.ndarray]) -> None:
        self.outputs = outputs

    def as_numpy(self, name: str) -> np.ndarray:
        return self.outputs[name]


class Server:
    """A repository served. `InferenceServerClient` stands for the class of the client library."""

    InferInput = InferInput

    def __init__(self, repository: Path) -> None:
        self.models = {path.parent.name: Model(path.parent) for path in repository.glob("*/config.pbtxt")}

    def InferenceServerClient(self, url: str) -> Server:
        assert re.fullmatch(r"localhost:8001", url)
        return self

    def infer(self, name: str, inputs: list[InferInput], **sequence: Any) -> Answer:
        return self.models[name].infer(inputs, **sequence)


class Model:
    def __init__(self, folder: Path) -> None:
        self.config = parse((folder / "config.pbtxt").read_text())
        assert self.config["name"] == folder.name
        self.session = ort.InferenceSession(str(folder / "1" / self.config["default_model_filename"]),
                                            providers=["CPUExecutionProvider"])
        self.states: dict[int, dict[str, np.ndarray]] = {}
        self.most = 0

    def infer(self, inputs: list[InferInput], sequence_id: int = 0, sequence_start: bool = False,
              sequence_end: bool = False) -> Answer:
        feed = self._feed(inputs)
        batching = self.config.get("sequence_batching")
        if batching is None:
            names = [o["name"] for o in self.config["output"]]
            return Answer(dict(zip(names, self.session.run(names, feed), strict=True)))
        assert sequence_id, "a request of a stateful model names its sequence"
        if sequence_start:
            self.states[sequence_id] = {s["input_name"]: first(s) for s in batching["state"]}
            self.most = max(self.most, len(self.states))
            assert len(self.states) <= batching["oldest"]["max_candidate_sequences"]
        state = self.states[sequence_id]
        given, made = (sorted(s[side] for s in batching["state"]) for side in ("input_name", "output_name"))
        names = [o["name"] for o in self.config["output"]]
        found = self.session.run([*names, *made], feed | state)
        self.states[sequence_id] = dict(zip(given, found[len(names):], strict=True))
        if sequence_end:
            del self.states[sequence_id]
        return Answer(dict(zip(names, found, strict=False)))

    def _feed(self, inputs: list[InferInput]) -> dict[str, np.ndarray]:
        stated = {i["name"]: i for i in self.config["input"]}
        assert {i.name for i in inputs} == set(stated)
        feed = {}
        for given in inputs:
            want = stated[given.name]
            batch, *dims = given.shape
            assert 1 <= batch <= self.config["max_batch_size"]
            assert len(dims) == len(want["dims"])
            assert all(w in (-1, d) for w, d in zip(want["dims"], dims, strict=True)), (given.name, dims)
            assert given.datatype == TYPES[want["data_type"]][0]
            shape = [batch, *want["reshape"]["shape"]] if "reshape" in want else given.shape
            feed[given.name] = given.values.reshape(shape)
        return feed


def first(state: dict[str, Any]) -> np.ndarray:
    (initial,) = state["initial_state"]
    assert initial["zero_data"]
    return np.zeros([1, *initial["dims"]], TYPES[initial["data_type"]][1])
