"""`--layers A:B`: the slices of a decoder, run one after the other, are the decoder; each needs only its own shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from engines.backends import open_session
from engines.cache import LatentCache
from engines.session import Feed, Outputs
from exporter.errors import InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export
from tests.model_checkpoints import tiny_checkpoint

PROMPT, STEPS, CONTEXT = 12, 3, 64


class Stage:
    """One export with its cache and sessions, fed piece by piece."""

    def __init__(self, made: Export) -> None:
        self.made, self.cache = made, LatentCache(made, 2, CONTEXT)

    def step(self, kind: str, feed: Feed) -> Outputs:
        with open_session(self.made, kind, "ort") as session:
            outputs = session.infer({**feed, **self.cache.feed()})
        self.cache.commit(outputs, next(iter(feed.values())).shape[1])
        return outputs


def needed(folder: Path, layer: int, layers: int) -> set[str]:
    """Shards that hold a layer, and the ends of the decoder where it is the first or last."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    ends = [] if 0 < layer < layers - 1 else ["embed_tokens"] + (["lm_head", "model.norm."] if layer else [])
    return {shard for name, shard in index.items() if any(part in name for part in (f".layers.{layer}.", *ends))}


@pytest.mark.parametrize("name", ["v3", "longcat", "kimi-k25", "minicpm3"])
def test_slices_in_a_row_are_the_whole(tmp_path: Path, name: str) -> None:
    folder = tiny_checkpoint(tmp_path / "whole", name, sharded=True)
    whole = export(ExportRequest(str(folder), tmp_path / "out", max_context=CONTEXT, logits="all"))
    layers, stages = whole.decoder.layers, []
    for layer in range(layers):
        part = tmp_path / f"part-{layer}"
        part.mkdir()
        shards = needed(folder, layer, layers)
        for file in ("config.json", "model.safetensors.index.json", *shards):
            shutil.copy(folder / file, part / file)
        assert len(shards) < len(list(folder.glob("*.safetensors")))
        logits = "all" if layer == layers - 1 else "last"
        made = export(ExportRequest(str(part), tmp_path / f"out-{layer}", layers=f"{layer}:{layer + 1}", logits=logits,
                                    max_context=CONTEXT))
        assert made.attentions == whole.decoder.attentions_per_layer
        stages.append(Stage(made))
    ids = np.random.default_rng(0).integers(0, whole.decoder.vocab_size, (2, PROMPT + STEPS))
    reference = Stage(whole)
    for start, stop, kind in [(0, PROMPT, "prefill"), *((PROMPT + i, PROMPT + i + 1, "decode") for i in range(STEPS))]:
        want = reference.step(kind, {"input_ids": ids[:, start:stop]})["logits"]
        outputs = stages[0].step(kind, {"input_ids": ids[:, start:stop]})
        for stage in stages[1:]:
            outputs = stage.step(kind, {"hidden_states": outputs["hidden_states_out"]})
        np.testing.assert_array_equal(outputs["logits"], want)


@pytest.mark.parametrize(("layers", "first", "last"), [("0:2", "input_ids", "hidden_states_out"),
                                                       ("1:", "hidden_states", "logits"),
                                                       (":", "input_ids", "logits")])
def test_ends_of_a_slice(tmp_path: Path, layers: str, first: str, last: str) -> None:
    folder = tiny_checkpoint(tmp_path / "checkpoint", "v3")
    made = export(ExportRequest(str(folder), tmp_path / "out", layers=layers, max_context=CONTEXT))
    decode = made.graph("decode")
    assert decode.inputs[0].name == first
    assert decode.outputs[0].name == last
    prefill = [spec.name for spec in made.graph("prefill").inputs]
    assert ("last_token" in prefill) == (last == "logits")


def test_all_logits_want_the_head(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "checkpoint", "v3")
    with pytest.raises(InputError, match="--logits all with --layers 0:2: the slice ends before the head"):
        export(ExportRequest(str(folder), tmp_path / "out", layers="0:2", max_context=CONTEXT, logits="all"))


@pytest.mark.parametrize("layers", ["2", "3:3", "2:1", "0:9", "-1:2", "a:b", "0:1:2"])
def test_a_slice_that_is_none(tmp_path: Path, layers: str) -> None:
    folder = tiny_checkpoint(tmp_path / "checkpoint", "v3")
    with pytest.raises(InputError, match="expected A:B with 0 <= A < B <= 3"):
        export(ExportRequest(str(folder), tmp_path / "out", layers=layers, max_context=CONTEXT))
    assert not (tmp_path / "out").exists()
