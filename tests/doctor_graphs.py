"""One attention of another exporter, filled with weights that mean something, sound and with what the field gets wrong.

`absorption_graphs` builds its nodes; here its tables hold cos and sin, its projections hot numbers, its scale the right
one, so that it can be run and measured. Faults are planted in the numbers or in the nodes of the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests import absorption_graphs as graphs
from tests.absorption_graphs import LATENT, NOPE, ROPE, D, H, Layer, V

POSITIONS = 4096
SCALE = (NOPE + ROPE) ** -0.5
CONFIG = {"model_type": "youtu", "rope_interleave": False, "hidden_size": D, "num_attention_heads": H,
          "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V,
          "q_lora_rank": None, "max_position_embeddings": POSITIONS, "rope_theta": 10000.0, "num_hidden_layers": 1}
YARN = {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}
STRETCH = np.array([1, 1 / 40, 1 / 40])  # what that does to the three frequencies of six columns
Plant = Callable[[Any], None]


def config_file(folder: Path, **changed: Any) -> Path:
    """The graph's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG | changed))
    return path


def filled(path: Path, make: Any = graphs.absorbed, plant: Plant | None = None) -> Path:
    """A graph of `absorption_graphs` with numbers in its weights; `plant` changes the finished model."""
    layer = Layer()
    make(layer)
    layer.save(path)
    model = onnx.load(path)
    rng = np.random.default_rng(3)
    angles = np.outer(np.arange(POSITIONS), 10000.0 ** (-np.arange(0, ROPE, 2) / ROPE))
    for tensor in model.graph.initializer:
        shape = tuple(tensor.dims)
        if tensor.data_type != TensorProto.FLOAT or not shape:
            continue
        if tensor.name in ("cos_table", "sin_table"):
            half = np.cos(angles) if tensor.name.startswith("cos") else np.sin(angles)
            put(model, tensor.name, np.concatenate([half, half], axis=1))
        elif tensor.name.startswith("gain"):
            put(model, tensor.name, rng.uniform(0.5, 1.5, shape))
        else:
            put(model, tensor.name, 2 * rng.standard_normal(shape) / shape[-2] ** 0.5)
    if any(t.name == "scale" for t in model.graph.initializer):
        put(model, "scale", np.array(SCALE))
    if plant is not None:
        plant(model)
    onnx.save(model, path)
    return path


def get(model: Any, name: str) -> np.ndarray:
    """A weight's values."""
    return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name))


def put(model: Any, name: str, values: np.ndarray) -> None:
    """New values for a weight, in its own dtype."""
    tensor = next(t for t in model.graph.initializer if t.name == name)
    dtype = numpy_helper.to_array(tensor).dtype
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(values).astype(dtype), name))


def halved(model: Any) -> None:
    """All floats of a model in float16."""
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16


def scaled(value: float) -> Plant:
    """Another softmax scale."""
    return lambda model: put(model, "scale", np.array(value))


def tables(make: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Plant:
    """Other angles, [positions, d_r / 2], made of positions and frequencies."""
    def plant(model: Any) -> None:
        angles = make(np.arange(POSITIONS), 10000.0 ** (-np.arange(0, ROPE, 2) / ROPE))
        for name, function in (("cos_table", np.cos), ("sin_table", np.sin)):
            put(model, name, np.concatenate([function(angles)] * 2, axis=1))

    return plant


def shorter(model: Any) -> None:
    """Rotary tables that end at a quarter of the context."""
    for name in ("cos_table", "sin_table"):
        put(model, name, get(model, name)[:POSITIONS // 4])


def factored(factor: float) -> Plant:
    """A factor on cos and sin."""
    def plant(model: Any) -> None:
        for name in ("cos_table", "sin_table"):
            put(model, name, factor * get(model, name))

    return plant


def in_a_branch(model: Any) -> None:
    """The output projection inside an If."""
    node = next(n for n in model.graph.node if n.name == "o")
    bodies = []
    for i in range(2):
        inner = helper.make_node(node.op_type, list(node.input), [f"branch_{i}"], name=f"o_{i}")
        bodies.append(helper.make_graph([inner], f"branch_{i}", [], [
            helper.make_tensor_value_info(f"branch_{i}", TensorProto.FLOAT, [None, None, D])]))
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    made = helper.make_node("If", ["yes"], list(node.output), name="choice", then_branch=bodies[0],
                            else_branch=bodies[1])
    node.CopyFrom(made)


# --- Faults in the nodes of our own decode graph ----------------------------------------------------------------------


def rewired(path: Path, plant: Plant) -> None:
    """A graph file changed in place."""
    model = onnx.load(path, load_external_data=False)
    plant(model)
    path.write_bytes(model.SerializeToString())


def _node(model: Any, ending: str) -> Any:
    return next(n for n in model.graph.node if n.name.endswith(ending))


def attend_all_rows(model: Any) -> None:
    """Every row of the past is visible, whatever the length."""
    node = _node(model, "within_length")
    model.graph.initializer.append(numpy_helper.from_array(np.array(1 << 40, np.int64), "fault/endless"))
    node.input[1] = "fault/endless"


def hide_itself(model: Any) -> None:
    """A token does not see itself, and what is hidden scores -inf: the first of an empty sequence sees nothing."""
    node = _node(model, "causal")
    node.op_type = "Less"
    for where in (n for n in model.graph.node if n.op_type == "Where"):
        kind = next((t for t in model.graph.initializer if t.name == where.input[2]), None)
        if kind is not None:
            values = numpy_helper.to_array(kind)
            kind.CopyFrom(numpy_helper.from_array(np.full_like(values, -np.inf), kind.name))


def positions_restart(model: Any) -> None:
    """New tokens count from 0 in every step."""
    node = _node(model, "rope/position")
    made = helper.make_node("Mul", [node.input[0], "fault/nothing"], ["fault/start"], name="fault/start")
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.int64), "fault/nothing"))
    at = list(model.graph.node).index(node)
    node.input[0] = "fault/start"
    model.graph.node.insert(at, made)


def first_length_for_all(model: Any) -> None:
    """Every sequence is masked by the first one's length."""
    for name in ("past_length_3d", "offset"):
        node = _node(model, name)
        made = helper.make_node("Expand", ["fault/first", "shapes/B"], [f"fault/{name}"], name=f"fault/{name}")
        at = list(model.graph.node).index(node)
        node.input[0] = f"fault/{name}"
        model.graph.node.insert(at, made)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.int64), "fault/zero"))
    model.graph.node.insert(0, helper.make_node("Gather", ["past_lengths", "fault/zero"], ["fault/first"],
                                                name="fault/first", axis=0))
