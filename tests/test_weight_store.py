"""Where weights lie: linked without a copy, copied to stand alone, or absent; and what changes with each.

Linked exports read the checkpoint's own files. What must be written (absorbed, split, rounded) is named here exactly.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cache as memo
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.backends import open_session
from engines.cache import LatentCache
from exporter.errors import InputError
from exporter.export import ExportRequest, export, relink
from exporter.manifest import Export, open_export
from exporter.safetensors_file import read_header
from exporter.weight_store import LINKED, WEIGHT_FILE
from tests.model_checkpoints import VOCAB, tiny_checkpoint
from tests.test_scale import child
from validate.synthetic import named_config, tensor_shapes

transformers = pytest.importorskip("transformers")

ROPE = {f"rope.{f}_{level}" for f in ("cos", "sin") for level in ("coarse", "fine")}
NORMS = {"q_a_norm.weight", "kv_a_norm.weight"}


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @memo
    def once(name: str, dtype: torch.dtype, sharded: bool) -> Path:
        return tiny_checkpoint(tmp_path_factory.mktemp("made") / name, name, dtype=dtype, sharded=sharded)

    return lambda name="v3", dtype=torch.float32, sharded=False: once(name, dtype, sharded)


@pytest.fixture
def checkpoint(made_once: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A tiny checkpoint of the test's own, to move or to change."""

    def copy(*args: Any, **options: Any) -> Path:
        return Path(shutil.copytree(made_once(*args, **options), tmp_path / "checkpoint"))

    return copy


@pytest.fixture
def other_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hard link can be made, as between two file systems."""

    def refuse(*paths: Any, **options: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)


def exported(model: Path, out: Path, **request: Any) -> Export:
    return export(ExportRequest(str(model), out, **{"scope": "model", "max_context": 64, **request}))


def logits(made: Export, backend: str = "ort") -> list[np.ndarray]:
    """A prompt of nine tokens and one decode step."""
    ids, cache, found = np.arange(3, 12)[None] % VOCAB, LatentCache(made, 1), []
    for kind, step in (("prefill", ids), ("decode", ids[:, :1])):
        with open_session(made, kind, backend) as session:
            feed = {"input_ids": step, **cache.feed()}
            if kind == "prefill":
                feed["last_token"] = np.array([step.shape[1] - 1])
            outputs = session.infer(feed)
        cache.commit(outputs, step.shape[1])
        found.append(outputs["logits"])
    return found


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def refuses(pattern: str, call: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=pattern) as caught:
        call()
    assert "\n" not in str(caught.value)


# --- link -------------------------------------------------------------------------------------------------------------


def absorbed(layers: int, shortcut: bool = False) -> set[str]:
    """What absorption makes of every attention, and its two latent norms, which may carry a factor."""
    places = [f"layers.{i}.attn{half}." for i in range(layers) for half in ((".0", ".1") if shortcut else ("",))]
    return {p + n for p in places for n in (*NORMS, "w_uk", "w_uv")}


MOVED: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "v3 for TensorRT": ("v3", {"target": "trt-rtx"}, absorbed(3)),
    "v3 for ONNX Runtime": ("v3", {"target": "ort"}, absorbed(3) | {
        f"layers.{i}.mlp.experts.{m}" for i in (1, 2) for m in ("gate_up", "down")}),
    "v3, unfused": ("v3", {"target": "ort", "experts": "gather"}, absorbed(3)),
    "v3, bf16": ("v3", {"target": "trt-rtx", "dtype": "bf16"}, absorbed(3) | {
        f"layers.{i}.mlp.router.weight" for i in (1, 2)}),
    "v3, expanded": ("v3", {"target": "trt-rtx", "prefill": "expanded"}, absorbed(3) | {
        f"layers.{i}.attn.kv_b" for i in range(3)}),
    "longcat": ("longcat", {"target": "trt-rtx"}, absorbed(2, shortcut=True)),
    "minicpm3, scaled head": ("minicpm3", {"target": "ort"}, absorbed(3) | {"norm.weight"}),
    "youtu, tied": ("youtu", {"target": "ort"}, absorbed(3)),
}


@pytest.mark.parametrize("case", MOVED)
def test_only_what_changes_is_written(case: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The hard link is the checkpoint's own file; logits are those of a copy, bit for bit."""
    name, request, written = MOVED[case]
    dtype = torch.bfloat16 if request.get("dtype") == "bf16" else torch.float32
    folder = checkpoint(name, dtype)
    linked = exported(folder, tmp_path / "linked", weights="link", **request)
    copied = exported(folder, tmp_path / "copied", **request)
    header = read_header(linked.folder / WEIGHT_FILE)
    assert set(header) == written | ROPE
    record = linked.data["weights"]
    assert record["written_bytes"] == sum(t.nbytes for t in header.values())
    assert record["bytes"] == copied.data["weights"]["bytes"]
    file = linked.folder / LINKED / "model.safetensors"
    assert not file.is_symlink()
    assert file.samefile(folder / "model.safetensors")
    assert file.stat().st_nlink == 2
    assert {r["how"] for r in record["linked"].values()} == {"hardlink"}
    backend = "interpreter" if request.get("dtype") == "bf16" else "ort"
    assert same(logits(linked, backend), logits(copied, backend))


def test_a_dtype_that_is_not_stored_is_written(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Nothing of a bfloat16 checkpoint can stay for a float16 graph but the float32 router bias."""
    made = exported(checkpoint("v3", torch.bfloat16), tmp_path / "x", weights="link", dtype="fp16")
    stays = set(made.data["weights"]["parameters"]) - set(read_header(made.folder / WEIGHT_FILE))
    assert stays == {f"layers.{i}.mlp.router.bias" for i in (1, 2)}


def test_shards_are_linked_where_they_are_read(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("v3", sharded=True)
    made = exported(folder, tmp_path / "x", weights="link", target="trt-rtx", layers="0:1")
    shards = {p.name for p in folder.glob("model-*.safetensors")}
    found = {p.name for p in (made.folder / LINKED).iterdir()}
    assert 0 < len(found) < len(shards)
    assert found < shards
    assert {f"{LINKED}/{n}" for n in found} == set(made.data["weights"]["linked"])


def test_a_hub_cache_is_linked_through_its_symlinks(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """snapshots/REVISION holds symlinks to blobs, whose names are digests."""
    folder = checkpoint("v3", sharded=True)
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(folder.iterdir())):
        blob = blobs / f"{i:064x}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    made = exported(snapshot, tmp_path / "x", weights="link")
    for place in (made.folder / LINKED).iterdir():
        assert not place.is_symlink()
        assert place.samefile(snapshot / place.name)
        assert (blobs / (snapshot / place.name).resolve().name).stat().st_ino == place.stat().st_ino
    assert same(logits(made), logits(exported(snapshot, tmp_path / "copied")))


@pytest.mark.parametrize("pad", [1, 2, 3])
def test_an_odd_offset_is_written_instead(pad: int, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A header of any length is legal; a tensor that lies between two floats' places cannot be read there."""
    folder = checkpoint("v3")
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    path.write_bytes((size + pad).to_bytes(8, "little") + raw[8:8 + size] + b" " * pad + raw[8 + size:])
    made = exported(folder, tmp_path / "x", weights="link", target="trt-rtx")
    assert made.data["weights"]["linked"] == {}
    assert not (made.folder / LINKED).exists()
    assert set(read_header(made.folder / WEIGHT_FILE)) == set(made.data["weights"]["parameters"])
    assert same(logits(made), logits(exported(folder, tmp_path / "copied", target="trt-rtx")))


# --- A checkpoint that moves or changes -------------------------------------------------------------------------------


def test_a_hard_link_survives_the_checkpoint(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("v3")
    made = exported(folder, tmp_path / "x", weights="link")
    before = logits(made)
    shutil.rmtree(folder)
    assert same(logits(open_export(made.folder)), before)


@pytest.mark.parametrize("how", ["hardlink", "handed"])
def test_relink_after_a_move(how: str, request: pytest.FixtureRequest, checkpoint: Callable[..., Path],
                             tmp_path: Path) -> None:
    """An export that lost its links (copied to another disk and back), or never had any, is pointed anew."""
    if how == "handed":
        request.getfixturevalue("other_disk")
    folder = checkpoint("v3", sharded=True)
    made = exported(folder, tmp_path / "x", weights="link")
    assert {r["how"] for r in made.data["weights"]["linked"].values()} == {how}
    before = logits(made)
    moved = folder.rename(tmp_path / "moved")
    if how == "hardlink":
        shutil.rmtree(made.folder / LINKED)
        (made.folder / LINKED).mkdir()
    refuses(r"its weights lie in .*model-0.*, which is not there; .* point the export to it with: .*--relink",
            lambda: open_export(made.folder))
    again = relink(made.folder, moved)
    assert {r["how"] for r in again.data["weights"]["linked"].values()} == {how}
    assert again.data["source"]["path"] == str(moved)
    assert not list((made.folder / LINKED).glob(".*"))
    assert same(logits(again), before)


def test_relink_takes_the_same_checkpoint_only(checkpoint: Callable[..., Path], made_once: Callable[..., Path],
                                               tmp_path: Path) -> None:
    made = exported(checkpoint("v3"), tmp_path / "x", weights="link")
    before = (made.folder / "manifest.json").read_bytes()
    other = tiny_checkpoint(tmp_path / "other", "v3", seed=1)
    refuses(r"--relink: .*model\.safetensors differs from the file", lambda: relink(made.folder, other))
    (tmp_path / "empty").mkdir()
    refuses(r"--relink: .*empty has no model\.safetensors", lambda: relink(made.folder, tmp_path / "empty"))
    refuses(r"--relink: .*gone is not a folder", lambda: relink(made.folder, tmp_path / "gone"))
    copied = exported(made_once("v3"), tmp_path / "copied")
    refuses(r"--relink: the weights of .*copied do not lie in a checkpoint", lambda: relink(copied.folder, other))
    assert (made.folder / "manifest.json").read_bytes() == before
    assert open_export(made.folder).data == made.data


@pytest.mark.parametrize("how", ["hardlink", "handed"])
@pytest.mark.parametrize("change", ["values", "longer", "shorter"])
def test_a_changed_checkpoint_is_refused(change: str, how: str, request: pytest.FixtureRequest,
                                         checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    if how == "handed":
        request.getfixturevalue("other_disk")
    folder = checkpoint("v3")
    made = exported(folder, tmp_path / "x", weights="link")
    with (folder / "model.safetensors").open("r+b") as f:
        if change == "values":
            f.seek(-4096, os.SEEK_END)
            f.write(b"\1" * 64)
        else:
            f.truncate(f.seek(0, os.SEEK_END) + {"longer": 1, "shorter": -1}[change])
    refuses(r"model\.safetensors was changed since the export \(its size or time differs\); export again, or, .*"
            r"--relink", lambda: open_export(made.folder))


def test_a_touched_checkpoint_is_itself_once_relinked(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("v3")
    made = exported(folder, tmp_path / "x", weights="link")
    os.utime(folder / "model.safetensors")
    refuses(r"was changed since the export .*--relink", lambda: open_export(made.folder))
    relink(made.folder, folder)
    assert same(logits(open_export(made.folder)), logits(exported(folder, tmp_path / "again", weights="link")))


def test_handed_weights_give_the_same_logits(checkpoint: Callable[..., Path], made_once: Callable[..., Path],
                                             other_disk: None, tmp_path: Path) -> None:
    folder = checkpoint("v3", sharded=True)
    made = exported(folder, tmp_path / "x", weights="link")
    assert not list(made.folder.rglob("model-*.safetensors"))
    assert same(logits(made), logits(exported(folder, tmp_path / "copied")))


# --- copy and none ----------------------------------------------------------------------------------------------------


def test_a_copy_stands_alone(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("v3", sharded=True)
    made = exported(folder, tmp_path / "x")
    assert made.data["weights"]["linked"] == {}
    assert made.data["weights"]["written_bytes"] == made.data["weights"]["bytes"]
    before = logits(made)
    shutil.rmtree(folder)
    moved = made.folder.rename(tmp_path / "moved")
    assert same(logits(open_export(moved, verify=True)), before)


def test_without_weights_there_is_no_weight_file(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("v3")
    made, copied = exported(folder, tmp_path / "x", weights="none"), exported(folder, tmp_path / "copied")
    assert {p.name for p in made.folder.iterdir()} == {"manifest.json", *(g.file for g in made.graphs)}
    assert made.data["weights"]["written_bytes"] == 0
    for fact in ("bytes", "parameters"):
        assert made.data["weights"][fact] == copied.data["weights"][fact]
    for g in made.graphs:  # the graphs are those of the copy, places of the weights included
        assert (made.folder / g.file).read_bytes() == (copied.folder / g.file).read_bytes()
    for backend in ("ort", "interpreter"):
        refuses(r"exported with --weights none, its graphs have no weights to run with; export with --weights copy or "
                r"link", partial(open_session, made, "decode", backend))


# --- Memory -----------------------------------------------------------------------------------------------------------


def sparse_checkpoint(folder: Path, config: dict[str, Any]) -> int:
    """A bfloat16 checkpoint of zeros that takes no room on the disk; returns its size."""
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in tensor_shapes(config):
        size = 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
        f.truncate(f.tell() + end)
    (folder / "config.json").write_text(json.dumps(config))
    return end


def test_linking_reads_next_to_nothing(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """4 GB of bfloat16, of which the absorbed 67 MB are written."""
    config = named_config("v3-class-7gb")[1] | {"num_hidden_layers": 8, "first_k_dense_replace": 8}
    size = sparse_checkpoint(tmp_path / "checkpoint", config)
    assert size > 3.5e9
    peak, seconds, data = child("exporter", "export", str(tmp_path / "checkpoint"), "--out", str(tmp_path / "x"),
                                "--weights", "link", "--dtype", "bf16", "--target", "trt-rtx")
    record_property("seconds, peak bytes", (seconds, peak))
    weights = data["weights"]
    assert weights["bytes"] > 0.95 * size
    assert weights["written_bytes"] < 0.04 * size
    assert peak < 400e6
