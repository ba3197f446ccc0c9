"""mobius-onnx: its exporter in a virtual environment of its own, its graph in this environment's ONNX Runtime.

It keeps keys and values per head, and its graph joins past and present: a step reads the past and writes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from exporter.safetensors_file import read_header
from validate import child, peer_environment
from validate.bench_timing import Step
from validate.peers import AbsentError, ModelShape, Past, Subject, pieces

NAME, PACKAGE = "mobius-onnx", "mobius-onnx==0.1.0"
PINS = ("torch==2.13.0", PACKAGE)  # torch first and alone: a looser request may choose a CUDA build of some GB
DEFAULT_CACHE = peer_environment.DEFAULT_CACHE


def install(cache: Path = DEFAULT_CACHE, progress: Callable[..., None] = lambda message, share=None: None) -> Path:
    """The Python that has mobius-onnx; made on first use under `cache`. AbsentError if that cannot be done here."""
    return peer_environment.install(NAME, cache / "mobius", PINS, progress)


def build(python: Path, checkpoint: Path, out: Path) -> child.Done:
    """Export `checkpoint` to `out` in float32. AbsentError where it fails."""
    words = [str(python), "-m", "mobius", "build", "--config", str(checkpoint), "--dtype", "f32", str(out)]
    try:
        done = child.run(words, env=peer_environment.variables())
    except OSError as error:
        raise AbsentError(f"mobius build: {error.strerror}") from None
    if done.code:
        raise AbsentError(f"mobius build failed: {done.last_line}")
    if not (out / "model.onnx").is_file():
        raise AbsentError("mobius build left no model.onnx")
    return done


class Mobius(Subject):
    """A graph that mobius built, with the session options of ours; inputs and outputs of a held step are bound once."""

    name = NAME
    working_caches = 2  # past and present

    def __init__(self, checkpoint: Path, graph: Path, threads: int) -> None:
        import onnxruntime as ort

        self._ort, self.shape, self._checkpoint = ort, ModelShape.of(checkpoint), checkpoint
        settings = ort.SessionOptions()
        settings.log_severity_level, settings.intra_op_num_threads = 3, threads
        settings.add_session_config_entry("session.intra_op.allow_spinning", "1")  # as ours, and as its users run it
        self._session: Any = ort.InferenceSession(str(graph), settings, providers=["CPUExecutionProvider"])
        self._outputs = [o.name for o in self._session.get_outputs()]
        self.cache_bytes_per_token = 4 * self.shape.expanded_floats

    def _inputs(self, tokens: np.ndarray, past: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        (batch, new), length = tokens.shape, past["past_key_values.0.key"].shape[2]
        positions = np.broadcast_to(np.arange(length, length + new), (batch, new))
        return {"input_ids": tokens, "attention_mask": np.ones((batch, length + new), np.int64),
                "position_ids": np.ascontiguousarray(positions), **past}

    def _past_names(self) -> list[tuple[str, str, int]]:
        """(input, output, columns) of every cache tensor."""
        s = self.shape
        return [(f"past_key_values.{i}.{kind}", f"present.{i}.{kind}", width)
                for i in range(s.layers) for kind, width in (("key", s.nope + s.rope), ("value", s.v))]

    def generate(self, prompt: np.ndarray, follow: np.ndarray) -> np.ndarray:
        """See Subject."""
        past = {name: np.zeros((len(prompt), self.shape.heads, 0, width), np.float32)
                for name, _, width in self._past_names()}
        found = []
        for piece in pieces(prompt, follow):
            values = self._session.run(self._outputs, self._inputs(piece, past))
            outputs = dict(zip(self._outputs, values, strict=True))
            found.append(outputs["logits"][:, -1])
            past = {name: outputs[present] for name, present, _ in self._past_names()}
        return np.stack(found)

    def hold(self, past: Past, token: np.ndarray) -> Step:
        """See Subject. The past is expanded here, as its own prefill would have left it."""
        binding, expanded = self._session.io_binding(), dict(self._expand(past))
        results = {present: np.zeros((*expanded[name].shape[:2], past.length + token.shape[1], width), np.float32)
                   for name, present, width in self._past_names()}
        results["logits"] = np.zeros((*token.shape, self.shape.vocabulary), np.float32)
        for bind, arrays in ((binding.bind_ortvalue_input, self._inputs(token, expanded)),
                             (binding.bind_ortvalue_output, results)):
            for name, array in arrays.items():
                bind(name, self._ort.OrtValue.ortvalue_from_numpy(array))  # no copy: the array's own memory

        def step() -> np.ndarray:
            self._session.run_with_iobinding(binding)
            return results["logits"][:, -1]

        return step

    def _expand(self, past: Past) -> Any:
        """Name and values of every cache tensor: keys [B, H, S, nope + rope] and values [B, H, S, v]."""
        s, weights = self.shape, {}
        for file in self._checkpoint.glob("*.safetensors"):
            weights.update({n: t for n, t in read_header(file).items() if n.endswith("kv_b_proj.weight")})
        for i, rows in enumerate(past.rows):
            weight = weights[f"model.layers.{i}.self_attn.kv_b_proj.weight"].load().astype(np.float32)
            wide = (rows[..., : s.latent] @ weight.T).reshape(past.batch, past.length, s.heads, s.nope + s.v)
            wide = wide.transpose(0, 2, 1, 3)
            key = np.empty((past.batch, s.heads, past.length, s.nope + s.rope), np.float32)
            key[..., : s.nope], key[..., s.nope :] = wide[..., : s.nope], rows[:, None, :, s.latent :]
            yield f"past_key_values.{i}.key", key
            yield f"past_key_values.{i}.value", np.ascontiguousarray(wide[..., s.nope :])
