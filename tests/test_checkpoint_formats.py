"""Every layout that checkpoints come in gives the same tensors, lazily; what is not read is refused in one line."""

from __future__ import annotations

import json
import re
import struct
import tracemalloc
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from exporter import safetensors_file
from exporter.dequantise import fp8_block, int4_groups
from exporter.errors import InputError
from exporter.layouts import canonical
from exporter.safetensors_file import SourceTensor, StoredSource, read_header
from tests.quantised_checkpoints import LINEAR, ROUTED, SIDE, Checkpoint
from tests.quantised_checkpoints import fp8_block as torch_fp8_block
from tests.quantised_checkpoints import int4_packed as torch_int4_packed

HIDDEN, LAYERS, EXPERTS = 256, 3, 3
DENSE, EXPERT, SHARED = 448, 192, 288  # rows that no block of 128 divides
CONFIG = {"model_type": "deepseek_v3", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN}
BITS = {2: (torch.int16, np.int16), 4: (torch.int32, np.int32)}
LINEARS = r"(?:q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)\.(?:weight|bias)"
FFN = r"(?:experts\.\d+\.|shared_experts\.)?(?:gate|up|down)_proj\.weight"
LAYER = (rf"(?:input|post_attention)_layernorm\.weight|self_attn\.(?:{LINEARS}|(?:q|kv)_a_layernorm\.weight)"
         rf"|mlp\.(?:{FFN}|gate\.(?:weight|e_score_correction_bias))")
CANONICAL = re.compile(rf"lm_head\.weight|model\.(?:embed_tokens\.weight|norm\.weight|layers\.\d+\.(?:{LAYER}))")


def decoder(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Checkpoint:
    """A text decoder's tensors under canonical names: one dense layer, two with experts, hot values."""
    g = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        # rows of very different size, so that a wrong scale shows
        return (torch.randn(rows, columns, generator=g) * 2 / columns ** 0.5
                * torch.exp2(torch.randint(-6, 6, (rows, 1), generator=g))).to(dtype)

    def gain(size: int) -> torch.Tensor:
        return (torch.rand(size, generator=g) + 0.5).to(dtype)

    tensors = {"model.embed_tokens.weight": matrix(40, HIDDEN), "model.norm.weight": gain(HIDDEN),
               "lm_head.weight": matrix(40, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors |= {f"{at}input_layernorm.weight": gain(HIDDEN), f"{at}post_attention_layernorm.weight": gain(HIDDEN)}
        at = f"model.layers.{layer}.self_attn."
        tensors |= {f"{at}q_a_proj.weight": matrix(96, HIDDEN), f"{at}q_a_proj.bias": gain(96),
                    f"{at}q_a_layernorm.weight": gain(96), f"{at}q_b_proj.weight": matrix(160, 96),
                    f"{at}kv_a_proj_with_mqa.weight": matrix(576, HIDDEN), f"{at}kv_a_layernorm.weight": gain(512),
                    f"{at}kv_b_proj.weight": matrix(140, 512), f"{at}o_proj.weight": matrix(HIDDEN, 64)}
        at, ffns = f"model.layers.{layer}.mlp.", {"": DENSE}
        if layer:
            tensors |= {f"{at}gate.weight": matrix(EXPERTS, HIDDEN),
                        f"{at}gate.e_score_correction_bias": torch.randn(EXPERTS, generator=g)}
            ffns = {"shared_experts.": SHARED} | {f"experts.{e}.": EXPERT for e in range(EXPERTS)}
        for ffn, size in ffns.items():
            tensors |= {f"{at}{ffn}gate_proj.weight": matrix(size, HIDDEN),
                        f"{at}{ffn}up_proj.weight": matrix(size, HIDDEN),
                        f"{at}{ffn}down_proj.weight": matrix(HIDDEN, size)}
    return Checkpoint.of(tensors, CONFIG)


@pytest.fixture(scope="module")
def plain() -> Checkpoint:
    return decoder()


def opened(folder: Path) -> dict[str, StoredSource]:
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in read_header(file).items()}


def read(folder: Path) -> dict[str, SourceTensor]:
    return canonical(opened(folder), json.loads((folder / "config.json").read_text()), str(folder / "config.json"))


def check(tensors: Mapping[str, SourceTensor], exact: Mapping[str, torch.Tensor]) -> None:
    """Same names, shapes and dtypes, same values bit for bit; `stored` names exactly the loaded bytes."""
    assert set(tensors) == set(exact)
    for name, tensor in tensors.items():
        values, expected = tensor.load(), exact[name].contiguous()
        assert tensor.shape == values.shape == tuple(expected.shape), name
        as_torch, as_numpy = BITS[expected.element_size()]
        assert values.dtype.name == str(expected.dtype).removeprefix("torch."), name
        assert np.array_equal(np.ascontiguousarray(values).view(as_numpy), expected.view(as_torch).numpy()), name
        if tensor.stored is not None:
            assert tensor.stored.shape == tensor.shape
            with tensor.stored.file.open("rb") as f:
                f.seek(tensor.stored.offset)
                assert f.read(tensor.stored.nbytes) == values.tobytes(), name


# --- Names ------------------------------------------------------------------------------------------------------------

Layout = Callable[[Checkpoint], Checkpoint]
LAYOUTS: dict[str, Layout] = {
    "hf": lambda c: c,
    "deepseek": lambda c: c.deepseek_names(),
    "kimi_linear": lambda c: c.kimi_linear_names(),
    "language_model": lambda c: c.wrapped(),
    "model.language_model": lambda c: c.wrapped("model.language_model.", inner="", head=""),
    "language": lambda c: c.wrapped("language."),
    "another wrapper": lambda c: c.wrapped("thinker.text."),
    "wrapped kimi_linear": lambda c: c.kimi_linear_names().wrapped(),
    "no prefix": lambda c: replace(c, tensors={n.removeprefix("model."): t for n, t in c.tensors.items()}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_names(layout: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made = LAYOUTS[layout](decoder(dtype))
    assert layout == "hf" or set(made.tensors) != set(made.exact)
    assert all(CANONICAL.fullmatch(n) for n in made.exact)
    tensors = read(made.write(tmp_path))
    check(tensors, made.exact)
    assert all(t.stored is not None for t in tensors.values())


def test_as_the_conversion_script_names_them(plain: Checkpoint, tmp_path: Path) -> None:
    """DeepSeek's own names, written out by hand."""
    own = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
           "head.weight": "lm_head.weight"}
    for old, new in (
            ("attn_norm.weight", "input_layernorm.weight"), ("ffn_norm.weight", "post_attention_layernorm.weight"),
            ("attn.wq.weight", "self_attn.q_proj.weight"), ("attn.wq_a.weight", "self_attn.q_a_proj.weight"),
            ("attn.wq_a.bias", "self_attn.q_a_proj.bias"), ("attn.q_norm.weight", "self_attn.q_a_layernorm.weight"),
            ("attn.wq_b.weight", "self_attn.q_b_proj.weight"),
            ("attn.wkv_a.weight", "self_attn.kv_a_proj_with_mqa.weight"),
            ("attn.kv_norm.weight", "self_attn.kv_a_layernorm.weight"),
            ("attn.wkv_b.weight", "self_attn.kv_b_proj.weight"), ("attn.wo.weight", "self_attn.o_proj.weight"),
            ("attn.indexer.wq_b.weight", "self_attn.indexer.wq_b.weight"),
            ("ffn.w1.weight", "mlp.gate_proj.weight"), ("ffn.w2.weight", "mlp.down_proj.weight"),
            ("ffn.w3.weight", "mlp.up_proj.weight"), ("ffn.gate.weight", "mlp.gate.weight"),
            ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
            ("ffn.experts.7.w1.weight", "mlp.experts.7.gate_proj.weight"),
            ("ffn.experts.7.w2.weight", "mlp.experts.7.down_proj.weight"),
            ("ffn.experts.7.w3.weight", "mlp.experts.7.up_proj.weight"),
            ("ffn.shared_experts.w1.weight", "mlp.shared_experts.gate_proj.weight"),
            ("ffn.shared_experts.w2.weight", "mlp.shared_experts.down_proj.weight"),
            ("ffn.shared_experts.w3.weight", "mlp.shared_experts.up_proj.weight")):
        own[f"layers.2.{old}"] = f"model.layers.2.{new}"
    made = {name: torch.full((2, 2), float(i)) for i, name in enumerate(own)}
    check(read(Checkpoint.of(made, CONFIG).write(tmp_path)), {own[n]: t for n, t in made.items()})


def test_unknown_names_pass_through(plain: Checkpoint, tmp_path: Path) -> None:
    names = ["model.layers.0.self_attn.1.kv_a_proj_with_mqa.weight", "model.layers.0.mlps.0.gate_proj.weight",
             "model.layers.1.input_layernorm.0.weight", "model.layers.1.mlp.router.classifier.weight",
             "model.layers.1.mlp.router.e_score_correction_bias", "model.layers.2.post_mlp_layernorm.weight",
             "model.layers.2.self_attn.indexer.wq_b.weight", "model.layers.0.self_attn.sinks", "visual.proj.weight",
             "model.layers.0.attn.w1.weight", "model.layers.0.mlp.experts.w1.scale", "embed.weight", "something.scale"]
    extra = {name: torch.full((3, 2), float(i)) for i, name in enumerate(names)}
    made = replace(plain, tensors=plain.tensors | extra, exact=plain.exact | extra)
    check(read(made.write(tmp_path)), made.exact)


def test_integers_that_are_no_weights_pass_through(plain: Checkpoint, tmp_path: Path) -> None:
    """A later stage knows whether it needs them; their values are refused as ever."""
    made = replace(plain, tensors=plain.tensors | {"model.position_ids": torch.arange(4)})
    tensor = read(made.write(tmp_path))["model.position_ids"]
    with pytest.raises(InputError, match=r"position_ids has dtype I64; expected one of F64, F32, F16, BF16; deq"):
        tensor.load()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prediction_blocks_and_rotary_tables_are_dropped(layout: str, plain: Checkpoint, tmp_path: Path) -> None:
    layer = {n.replace(".2.", ".{}.", 1): t for n, t in plain.tensors.items() if n.startswith("model.layers.2.")}
    extra = {n.format(number): t for n, t in layer.items() for number in (LAYERS, LAYERS + 1, 10, 20)}
    extra |= {n.replace("model.layers.{}", "model.mtp.layers.0"): t for n, t in layer.items()}
    extra |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
              **{f"model.layers.{n}.eh_proj.weight": torch.ones(2, 2) for n in (LAYERS, LAYERS + 1, 10, 20)},
              f"model.layers.{LAYERS}.self_attn.q_a_proj.qweight": torch.ones(2, 2, dtype=torch.int32),
              "model.layers.1.mtp.block.weight": torch.ones(2, 2, dtype=torch.int8)}
    made = LAYOUTS[layout](replace(plain, tensors=plain.tensors | extra))
    made.tensors["mtp.0.head.weight"] = torch.ones(2, 2)
    check(read(made.write(tmp_path)), plain.exact)


def test_every_layer_stays_without_their_number(plain: Checkpoint, tmp_path: Path) -> None:
    made = replace(plain, config={"model_type": "deepseek_v3"})
    check(read(made.write(tmp_path)), plain.exact)


def test_one_layer_attention(plain: Checkpoint, tmp_path: Path) -> None:
    """Only some tensors given, as for one layer of a partial download, in any layout."""
    for number, layout in enumerate(("hf", "deepseek", "language_model", "model.language_model")):
        made = LAYOUTS[layout](plain.fp8_block())
        folder = made.write(tmp_path / str(number))
        stored = {n: t for n, t in opened(folder).items() if re.match(r"(?:.*\.)?layers\.1\.(?:self_attn|attn)\.", n)}
        check(canonical(stored, made.config, "x"), {n: t for n, t in made.exact.items() if ".1.self_attn." in n})


def test_a_wrapper_without_attention(plain: Checkpoint, tmp_path: Path) -> None:
    made = {n: t for n, t in plain.wrapped().tensors.items() if ".self_attn." not in n}
    exact = {n: t for n, t in plain.exact.items() if ".self_attn." not in n}
    check(read(replace(plain, tensors=made).write(tmp_path)), exact)


def test_names_that_collide(plain: Checkpoint, tmp_path: Path) -> None:
    made = plain.wrapped()
    made.tensors["lm_head.weight"] = torch.ones(2, 2)
    pattern = r"tensors (\w+\.)?lm_head.weight and (\w+\.)?lm_head.weight both read as lm_head.weight; expected one of"
    with pytest.raises(InputError, match=pattern):
        read(made.write(tmp_path))


def test_two_decoders(plain: Checkpoint, tmp_path: Path) -> None:
    made = plain.wrapped()
    made.tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] = torch.ones(2, 2)
    pattern = r"2 tensors named \*layers.\d.self_attn.kv_a_proj_with_mqa.weight; expected one text decoder, not "
    with pytest.raises(InputError, match=pattern + "'' and 'language_model.'"):
        read(made.write(tmp_path / "a"))
    both = plain.wrapped().tensors | plain.wrapped("language.").tensors
    with pytest.raises(InputError, match=pattern + "'language.' and 'language_model.'"):
        read(replace(plain, tensors=both).write(tmp_path / "b"))


# --- FP8 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ue8m0", [None, "F32", "F8_E8M0"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_block(layout: str, ue8m0: str | None, plain: Checkpoint, tmp_path: Path) -> None:
    made = LAYOUTS[layout](plain.fp8_block(ue8m0=ue8m0))
    folder = made.write(tmp_path)
    stored = opened(folder)
    scales = [n for n in stored if SIDE.fullmatch(n)]
    assert len(scales) == sum(bool(re.search(LINEAR + "$", n)) for n in plain.tensors)
    assert {stored[n].dtype for n in scales} == {ue8m0 or "F32"}
    for name in scales:
        weight = re.sub(r"weight_scale_inv$|scale$", "weight", name)
        assert stored[weight].dtype == "F8_E4M3"
        assert stored[weight].file != stored[name].file
    tensors = read(folder)
    check(tensors, made.exact)
    for name, tensor in tensors.items():
        assert (tensor.stored is None) == bool(re.search(LINEAR + "$", name))
    near = made.exact["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]  # and it is the weight, nearly
    assert torch.allclose(near, plain.exact["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].float(), rtol=0.07,
                          atol=0.2)


@pytest.mark.parametrize("block", [(128, 128), (64, 128), (16, 24), (1, 128), (1000, 1000)])
def test_fp8_block_sizes(block: tuple[int, int], plain: Checkpoint, tmp_path: Path) -> None:
    made = plain.fp8_block(block)
    check(read(made.write(tmp_path)), made.exact)


def test_fp8_where_the_configuration_lies(plain: Checkpoint, tmp_path: Path) -> None:
    """Beside the text's configuration or within it; DeepSeek's own layout needs none, its blocks are 128 x 128."""
    made = plain.fp8_block().wrapped()
    stated = made.config["text_config"]["quantization_config"]
    top = made.config | {"text_config": CONFIG, "quantization_config": stated}
    check(read(replace(made, config=top).write(tmp_path / "top")), made.exact)
    language = {"language_config": made.config["text_config"], "model_type": "deepseek_vl_v2"}
    check(read(replace(made, config=language).write(tmp_path / "language")), made.exact)
    own = plain.fp8_block().deepseek_names()
    check(read(replace(own, config={"n_layers": LAYERS}).write(tmp_path / "own")), own.exact)


def test_fp8_in_part(plain: Checkpoint, tmp_path: Path) -> None:
    """Weights without a scale that are floats are not quantised."""
    made = plain.fp8_block(which=r"q_b_proj\.weight")
    check(read(made.write(tmp_path / "part")), made.exact)
    check(read(replace(plain, config=made.config).write(tmp_path / "none")), plain.exact)


@pytest.mark.parametrize("shape", [(576, 256), (192, 130), (288, 128), (448, 1), (1, 300), (128, 128), (129, 257)])
@pytest.mark.parametrize("powers", [False, True])
def test_fp8_arithmetic(shape: tuple[int, int], powers: bool) -> None:
    """Against torch, one element at a time: index of the block by division, as the format says."""
    weight = torch.randn(shape) * torch.exp2(torch.randint(-9, 9, (shape[0], 1)))
    codes, scale, values = torch_fp8_block(weight, (128, 128), powers)
    got = fp8_block(codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn), scale.numpy(), (128, 128))
    assert np.array_equal(got, values.numpy())
    for i, j in {(0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 2), (shape[0] - 1, 0)}:
        assert got[i, j] == (codes[i, j].float() * scale[i // 128, j // 128]).item()


def test_every_code_of_fp8_and_of_ue8m0() -> None:
    """All 256 codes, both zeros and both NaNs; all powers of two a scale can be, and no warning where they overflow."""
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    assert int(expected.isnan().sum()) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = fp8_block(codes.numpy().view(ml_dtypes.float8_e4m3fn)[None], np.ones((1, 2), np.float32), (128, 128))
        assert np.array_equal(got[0].view(np.int32)[~expected.isnan().numpy()],
                              expected.view(torch.int32).numpy()[~expected.isnan().numpy()])
        assert np.isnan(got[0][expected.isnan().numpy()]).all()
        for code in range(256):
            power = torch.tensor([[code]], dtype=torch.uint8)
            got = fp8_block(codes.numpy().view(ml_dtypes.float8_e4m3fn)[None],
                            power.numpy().view(ml_dtypes.float8_e8m0fnu), (1, 256))
            by_torch = expected * power.view(torch.float8_e8m0fnu).float()
            assert np.array_equal(got, by_torch.numpy(), equal_nan=True), code


# --- int4 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["hf", "kimi_linear", "language_model", "model.language_model"])
@pytest.mark.parametrize(("group", "scale"), [(32, torch.bfloat16), (32, torch.float16), (64, torch.float32),
                                              (8, torch.bfloat16)])
def test_int4_packed(layout: str, group: int, scale: torch.dtype, plain: Checkpoint, tmp_path: Path) -> None:
    made = LAYOUTS[layout](plain.int4_packed(group, scale=scale))
    folder = made.write(tmp_path)
    stored = opened(folder)
    packed = [n for n in stored if n.endswith(".weight_packed")]
    assert len(packed) == 3 * EXPERTS * (LAYERS - 1)
    for name in packed:
        for part in ("weight_scale", "weight_shape"):
            assert stored[name].file != stored[name.replace("weight_packed", part)].file
    tensors = read(folder)
    check(tensors, made.exact)
    for name, tensor in tensors.items():
        assert (tensor.stored is None) == bool(re.search(ROUTED + "$", name))
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    assert not torch.equal(made.exact[name], plain.exact[name].float())


def test_int4_shape_as_int32(plain: Checkpoint, tmp_path: Path) -> None:
    made = plain.int4_packed()
    for name in [n for n in made.tensors if n.endswith("weight_shape")]:
        made.tensors[name] = made.tensors[name].to(torch.int32)
    check(read(made.write(tmp_path)), made.exact)


def test_int4_order_by_hand() -> None:
    """0x76543210 holds 0 - 8 first and 7 - 8 last; the sign bit of the word is a value's bit like any other."""
    packed = np.array([[0x76543210, 0x0FEDCBA9 - (1 << 32) + (8 << 28)]], np.int32)
    assert packed[0, 1] < 0
    got = int4_groups(packed, np.array([[1.0, 10.0]], np.float32), 8)
    assert got.tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1, 10, 20, 30, 40, 50, 60, 70, 0]]


@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (700, 1024), (2048, 32)])
def test_int4_arithmetic(shape: tuple[int, int]) -> None:
    """More rows than one band; element by element at the corners."""
    packed, scale, values = torch_int4_packed(torch.randn(shape), 32, torch.float32)
    got = int4_groups(packed.numpy(), scale.numpy(), 32)
    assert np.array_equal(got, values.numpy())
    for i, j in {(0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, 3), (shape[0] - 1, 17)}:
        code = (int(packed[i, j // 8]) >> (4 * (j % 8))) & 15
        assert got[i, j] == (code - 8) * scale[i, j // 32].item()


# --- Fused experts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".weight"])
@pytest.mark.parametrize("layout", ["hf", "language_model", "model.language_model"])
def test_fused_experts(layout: str, suffix: str, plain: Checkpoint, tmp_path: Path) -> None:
    made = plain.fused_experts()
    made = replace(made, tensors={n + suffix if ".experts." in n else n: t for n, t in made.tensors.items()})
    made = LAYOUTS[layout](made)
    assert sum(t.ndim == 3 for t in made.tensors.values()) == 2 * (LAYERS - 1)
    tensors = read(made.write(tmp_path))
    check(tensors, plain.exact)
    stored = [tensors[f"model.layers.1.mlp.experts.{e}.{p}_proj.weight"].stored for e in (0, 1) for p in ("gate", "up")]
    for before, after in pairwise(stored):
        assert before is not None
        assert after is not None
        assert before.offset + before.nbytes == after.offset


def test_fused_experts_of_kimi_linear(plain: Checkpoint, tmp_path: Path) -> None:
    made = plain.fused_experts()
    made = replace(made, tensors={re.sub(r"(layers\.[12])\.mlp\.", r"\1.block_sparse_moe.", n): t
                                  for n, t in made.tensors.items()})
    check(read(made.write(tmp_path)), plain.exact)


# --- As transformers saves --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A MoE model of transformers' own, and its tensors by canonical name."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "deepseek_v3", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=48,
        num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=20, qk_rope_head_dim=10, v_head_dim=12,
        n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=40,
        first_k_dense_replace=1, n_shared_experts=1)
    model = AutoModelForCausalLM.from_config(config).eval()
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder)
    state = dict(model.state_dict())
    for part in ("gate_up_proj", "down_proj"):
        for e, matrix in enumerate(state.pop(f"model.layers.1.mlp.experts.{part}")):
            pieces = {"down_proj": matrix} if part == "down_proj" else {
                "gate_proj": matrix[:40], "up_proj": matrix[40:]}
            state |= {f"model.layers.1.mlp.experts.{e}.{n}.weight": t for n, t in pieces.items()}
    return folder, state


def test_as_transformers_saves(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    check(read(saved[0]), saved[1])


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_requantised(kind: str, saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    made = Checkpoint.read(saved[0])
    made = made.fp8_block((16, 24)).deepseek_names() if kind == "fp8" else made.int4_packed(8).wrapped()
    assert set(made.exact) == set(saved[1])
    check(read(made.write(tmp_path)), made.exact)


# --- Laziness ---------------------------------------------------------------------------------------------------------


def sparse(path: Path, tensors: Mapping[str, tuple[str, int, list[int]]]) -> dict[str, StoredSource]:
    """A file of any size whose values take no room on the disk: name -> dtype, bytes an item, shape."""
    header, end = {}, 0
    for name, (dtype, width, shape) in tensors.items():
        size = width * int(np.prod(shape, dtype=object))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + end)
    return read_header(path)


def test_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hundred gigabytes of FP8 and fused experts; then a single expert of them."""
    huge: dict[str, tuple[str, int, list[int]]] = {"layers.0.self_attn.q_b_proj.weight": ("BF16", 2, [24576, 1536])}
    for layer in range(8):
        at = f"model.layers.{layer}.mlp."
        huge |= {f"{at}up_proj.weight": ("F8_E4M3", 1, [1 << 17, 1 << 17]),
                 f"{at}up_proj.weight_scale_inv": ("F32", 4, [1 << 10, 1 << 10]),
                 f"{at}experts.gate_up_proj": ("BF16", 2, [256, 1 << 13, 1 << 13])}
    stored = sparse(tmp_path / "model.safetensors", huge)
    assert (tmp_path / "model.safetensors").stat().st_size > 350e9
    assert (tmp_path / "model.safetensors").stat().st_blocks < 100
    config = {"num_hidden_layers": 8, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}

    with monkeypatch.context() as patched:
        def fail(*_: Any, **__: Any) -> None:
            raise AssertionError("a value was read")

        patched.setattr(safetensors_file.np, "memmap", fail)
        patched.setattr(StoredSource, "load_raw", fail)
        tensors = canonical(stored, config, "x")
        with pytest.raises(AssertionError, match="a value was read"):
            tensors["model.layers.3.mlp.up_proj.weight"].load()
    assert len(tensors) == 1 + 8 * (1 + 2 * 256)
    assert tensors["model.layers.3.mlp.up_proj.weight"].shape == (1 << 17, 1 << 17)
    expert = tensors["model.layers.7.mlp.experts.255.up_proj.weight"]
    assert expert.load().shape == (1 << 12, 1 << 13)
    assert expert.stored is not None
    end = (tmp_path / "model.safetensors").stat().st_size
    assert expert.stored.offset + expert.stored.nbytes == end


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_memory_is_the_result_and_little_more(kind: str) -> None:
    rows, columns = 7168, 2048
    if kind == "fp8":
        arguments: tuple[Any, ...] = (np.zeros((rows, columns), np.uint8).view(ml_dtypes.float8_e4m3fn),
                                      np.ones((56, 16), np.float32), (128, 128))
    else:
        arguments = (np.zeros((rows, columns // 8), np.int32), np.ones((rows, columns // 32), np.float16), 32)
    tracemalloc.start()
    try:
        (fp8_block if kind == "fp8" else int4_groups)(*arguments)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 4 * rows * columns <= peak < 1.1 * 4 * rows * columns


# --- What is refused --------------------------------------------------------------------------------------------------

AT = "model.layers.1.mlp.experts.0.up_proj."
FUSED = "model.layers.1.mlp.experts."
Q_B, KV_A, NORM = (f"model.layers.0.self_attn.{name}." for name in ("q_b_proj", "kv_a_proj_with_mqa", "q_a_layernorm"))
GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
WAY_OUT = r"dequantise the checkpoint first, or use its bf16 release"


def changed(make: Layout, *, config: dict[str, Any] | None = None, weights: dict[str, Any] | None = None,
            drop: str | None = None, **tensors: torch.Tensor) -> Layout:
    """`make`, then the quantization_config (or its group) changed, a tensor dropped, others set (see `put`)."""
    def apply(checkpoint: Checkpoint) -> Checkpoint:
        made = make(checkpoint)
        quantisation = json.loads(json.dumps(made.config.get("quantization_config", {}))) | (config or {})
        if weights:
            quantisation["config_groups"]["group_0"]["weights"] |= weights
        kept = {n: t for n, t in made.tensors.items() if n != drop}
        return replace(made, tensors=kept | {n.replace("__", "."): t for n, t in tensors.items()},
                       config=made.config | {"quantization_config": quantisation})
    return apply


def fp8(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint.fp8_block()


def int4(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint.int4_packed()


def same(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint


def put(base: str, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors by full name, as keywords: two underscores for a dot."""
    return {(base + name).replace(".", "__"): tensor for name, tensor in tensors.items()}


INT = torch.ones(4, 4, dtype=torch.int32)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
REFUSED: dict[str, tuple[Layout, str]] = {
    # FP8
    "fp8 without its scale": (
        changed(fp8, drop=f"{Q_B}weight_scale_inv"),
        r"tensor \S+0.self_attn.q_b_proj.weight has dtype F8_E4M3; expected one of F64, F32, F16, BF16; "
        rf"{WAY_OUT} \(or fetch its missing scale, weight_scale_inv\)$"),
    "scale without its weight": (
        changed(fp8, drop=f"{Q_B}weight"),
        r"tensor \S+q_b_proj.weight_scale_inv is a scale, but its weight is missing; expected an F8_E4M3 weight"),
    "scale beside floats": (
        changed(fp8, **put(Q_B, weight=torch.ones(160, 96))),
        r"q_b_proj.weight_scale_inv is a scale, but its weight is F32; expected an F8_E4M3 weight"),
    "scale too small": (
        changed(fp8, **put(KV_A, weight_scale_inv=torch.ones(4, 2))),
        r"tensor model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv has shape \[4, 2\]; expected \[5, 2\], "
        r"one a block of 128 x 128 of \S+kv_a_proj_with_mqa.weight \[576, 256\]$"),
    "scale transposed": (
        changed(fp8, **put(KV_A, weight_scale_inv=torch.ones(2, 5))),
        r"kv_a_proj_with_mqa.weight_scale_inv has shape \[2, 5\]; expected \[5, 2\]"),
    "scale flat": (
        changed(fp8, **put(Q_B, weight_scale_inv=torch.ones(2))), r"has shape \[2\]; expected \[2, 1\]"),
    "scale of integers": (
        changed(fp8, **put(Q_B, weight_scale_inv=torch.ones(2, 1, dtype=torch.int32))),
        r"q_b_proj.weight_scale_inv has dtype I32; expected F32 or F8_E8M0 for a scale"),
    "other block size": (
        changed(fp8, config={"weight_block_size": [64, 64]}), r"has shape \[\d, \d\]; expected \[\d, \d\]"),
    "no block size": (
        changed(fp8, config={"weight_block_size": None}),
        rf"weights are quantised \(fp8\); expected fp32, fp16 or bf16 weights; {WAY_OUT} \(weight_block_size is None, "
        r"not two sizes; so model\S+ \[\d+, \d+\] F8_E4M3 is not read\)$"),
    "strange block size": (
        changed(fp8, config={"weight_block_size": [128, True]}), r"weight_block_size is \[128, True\], not two sizes"),
    "fp8 without block size, floats stored": (
        changed(same, config={"quant_method": "fp8"}),
        r"weights are quantised \(fp8\); expected fp32.*\(weight_block_size is None, not two sizes\)$"),
    "fp8 of the other kind": (
        changed(fp8, **put(Q_B, weight=torch.ones(160, 96).to(E5M2))),
        r"q_b_proj.weight has dtype F8_E5M2; expected one of F64, F32, F16, BF16"),
    "one scale per tensor": (
        changed(same, **put(Q_B, weight=torch.ones(160, 96).to(E4M3), weight_scale=torch.ones(1))),
        r"q_b_proj.weight\S* .*\(one scale per tensor or row is not read here\)"),
    "fp8 vector": (
        changed(fp8, **put(NORM, weight=torch.ones(96).to(E4M3), weight_scale_inv=torch.ones(1))),
        r"q_a_layernorm.weight has dtype F8_E4M3; .* \(and shape \[96\], where FP8 is read as matrices\)"),
    "fp8 fused experts": (
        changed(fp8, **put(FUSED, down_proj=torch.ones(3, 256, 192).to(E4M3), down_proj_scale_inv=torch.ones(3, 2, 2))),
        r"experts.down_proj has dtype F8_E4M3; .* \(and shape \[3, 256, 192\], where FP8 is read as matrices\)"),
    "fp8 without configuration": (
        lambda c: replace(c.fp8_block(), config=CONFIG),
        r"weight is F8_E4M3 with a scale, but the configuration states no weight_block_size"),
    "int8": (
        changed(fp8, **put(Q_B, weight=torch.ones(160, 96, dtype=torch.int8))),
        rf"q_b_proj.weight has dtype I8; expected one of F64, F32, F16, BF16; {WAY_OUT}"),
    # packed int4
    "packed without configuration": (
        lambda c: replace(c.int4_packed(), config=CONFIG),
        r"weight_packed is packed, but the configuration states no compressed-tensors quantization_config"),
    "packed without scale": (
        changed(int4, drop=f"{AT}weight_scale"), r"experts.0.up_proj.weight_packed stands without its weight_scale"),
    "packed without shape": (
        changed(int4, drop=f"{AT}weight_shape"), r"experts.0.up_proj.weight_packed stands without its weight_shape"),
    "shape without packed": (
        changed(int4, drop=f"{AT}weight_packed"), r"up_proj.weight_s\w+ \[\S.* stands without weight_packed"),
    "int4 scale misshapen": (
        changed(int4, **put(AT, weight_scale=torch.ones(192, 7))),
        r"up_proj.weight_scale has shape \[192, 7\]; expected \[192, 8\], one a group of 32 of \S+weight_packed$"),
    "int4 scale of integers": (
        changed(int4, **put(AT, weight_scale=INT)), r"up_proj.weight_scale has dtype I32; expected BF16 or F16 or F32"),
    "packed bytes": (
        changed(int4, **put(AT, weight_packed=INT.to(torch.uint8))), r"weight_packed has dtype U8; expected I32"),
    "packed stack": (
        changed(int4, **put(AT, weight_packed=INT[None])), r"weight_packed has shape \[1, 4, 4\]; expected a matrix"),
    "packed ragged": (
        changed(int4, weights={"group_size": 40}), r"has rows of \d+ values; expected a multiple of the group size 40"),
    "int4 shape misshapen": (
        changed(int4, **put(AT, weight_shape=torch.tensor([1, 2, 3]))),
        r"up_proj.weight_shape has shape \[3\]; expected \[2\], rows and columns"),
    "8 bits": (
        changed(int4, weights={"num_bits": 8}),
        rf"weights are quantised \(compressed-tensors\); expected fp32, fp16 or bf16 weights; {WAY_OUT} "
        r"\(group_0.weights.num_bits is 8, not 4; so \S+ \[\d+, \d+\] I32 is not read\)$"),
    "asymmetric": (changed(int4, weights={"symmetric": False}), r"group_0.weights.symmetric is False, not True"),
    "by channel": (changed(int4, weights={"strategy": "channel"}), r"weights.strategy is 'channel', not 'group'"),
    "floats": (changed(int4, weights={"type": "float"}), r"group_0.weights.type is 'float', not 'int'"),
    "reordered": (changed(int4, weights={"actorder": "group"}), r"weights.actorder is 'group', not null"),
    "group size": (changed(int4, weights={"group_size": None}), r"weights.group_size is None, not a size"),
    "no groups": (changed(int4, config={"config_groups": {}}), r"config_groups state 0 group sizes, not one"),
    "two group sizes": (
        changed(int4, config={"config_groups": {n: {"weights": GROUP | {"group_size": n}} for n in (32, 64)}}),
        r"config_groups state 2 group sizes, not one"),
    "broken group": (changed(int4, config={"config_groups": {"group_0": 3}}), r"group_0 does not describe weights"),
    "other format": (
        changed(int4, config={"format": "float-quantized"}), r"format is 'float-quantized', not 'pack-quantized'"),
    "rotated": (changed(int4, config={"transform_config": {"config_groups": {}}}), r"transform_config is .*, not null"),
    "sparse": (changed(int4, config={"sparsity_config": {"format": "sparse"}}), r"sparsity_config is .*, not null"),
    "zero points": (
        changed(int4, **put(AT, weight_zero_point=INT)),
        r"up_proj.weight_zero_point \[4, 4\] I32 belongs to asymmetric compressed-tensors weights"),
    "order": (
        changed(int4, **put(AT, weight_g_idx=INT)),
        r"up_proj.weight_g_idx \[4, 4\] I32 belongs to reordered compressed-tensors weights"),
    # other methods
    "gptq tensors": (
        changed(same, drop=f"{Q_B}weight", **put(Q_B, qweight=INT, qzeros=INT, scales=torch.ones(4, 4), g_idx=INT)),
        rf"q_b_proj.q\w+ \[4, 4\] I32 belongs to AWQ or GPTQ weights, which are not read here; {WAY_OUT}$"),
    "awq": (
        changed(same, config={"quant_method": "awq", "bits": 4}, **put(Q_B, qweight=INT)),
        r"weights are quantised \(awq\); .* \(only fp8 in blocks and packed int4 are read quantised; "
        r"so \S+q_b_proj.qweight \[4, 4\] I32 is not read\)$"),
    "bitsandbytes": (
        changed(same, **put(Q_B, **{"weight": INT.to(torch.uint8), "weight.absmax": torch.ones(2)})),
        r"q_b_proj.weight has dtype U8|q_b_proj.weight.absmax \[2\] F32 belongs to bitsandbytes"),
    "bitsandbytes state": (
        changed(same, **put(Q_B, **{"weight.quant_state.nf4": INT})),
        r"weight.quant_state.nf4 \[4, 4\] I32 belongs to bitsandbytes weights"),
    "a method stated, floats stored": (
        changed(same, config={"quant_method": "quark"}), r"weights are quantised \(quark\); expected fp32"),
    "method not stated": (
        changed(same, config={"bits": 4}), r"weights are quantised \(method not stated\); expected fp32"),
    "method a string": (
        lambda c: replace(c, config=CONFIG | {"quantization_config": "awq"}), r"weights are quantised \(awq\); ex"),
    # fused experts and the configuration
    "fused the other way round": (
        changed(same, **put(FUSED, gate_up_proj=torch.ones(3, 256, 384))),
        r"experts.gate_up_proj has shape \[3, 256, 384\]; expected \[experts, 2 x intermediate, hidden\] with "
        r"hidden_size 256 \(are the matrices transposed\?\)$"),
    "fused down the other way round": (
        changed(same, **put(FUSED, down_proj=torch.ones(3, 192, 256))),
        r"experts.down_proj has shape \[3, 192, 256\]; expected \[experts, hidden, intermediate\]"),
    "fused odd": (
        changed(same, **put(FUSED, gate_up_proj=torch.ones(3, 7, 256))),
        r"has shape \[3, 7, 256\]; expected \[experts, 2 x intermediate, hidden\]"),
    "fused empty": (
        changed(same, **put(FUSED, gate_up_proj=torch.ones(3, 0, 256))), r"has shape \[3, 0, 256\]; expected \[exp"),
    "number of layers": (
        lambda c: replace(c, config={"num_hidden_layers": "3"}), r"num_hidden_layers is '3'; expected a number from 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, plain: Checkpoint, tmp_path: Path) -> None:
    make, pattern = REFUSED[case]
    folder = make(plain).write(tmp_path)
    with pytest.raises(InputError, match=pattern) as error:
        read(folder)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(folder / "config.json"))


def test_refused_within_a_wrapper_under_the_stored_name(plain: Checkpoint, tmp_path: Path) -> None:
    made = plain.fp8_block().wrapped()
    del made.tensors["language_model.model.layers.0.self_attn.q_b_proj.weight_scale_inv"]
    with pytest.raises(InputError, match=r"tensor language_model.model.layers.0.self_attn.q_b_proj.weight has dtype"):
        read(made.write(tmp_path))


def test_a_quantised_vision_tower_is_none_of_ours(plain: Checkpoint, tmp_path: Path) -> None:
    made = plain.wrapped()
    made.tensors["vision_tower.encoder.blocks.0.wqkv.qweight"] = INT
    check(read(made.write(tmp_path)), made.exact)


def test_a_shape_that_lies_is_found_on_load(plain: Checkpoint, tmp_path: Path) -> None:
    """Its values are read then, not before."""
    made = plain.int4_packed()
    made.tensors[f"{AT}weight_shape"] = torch.tensor([256, 192])
    tensors = read(made.write(tmp_path))
    with pytest.raises(InputError, match=r"up_proj.weight_shape says \[256, 192\]; expected \[192, 256\], which"):
        tensors[f"{AT}weight"].load()


def test_codes_load_raw_only(tmp_path: Path) -> None:
    tensors = {"e4m3": torch.ones(2, 3).to(torch.float8_e4m3fn), "e8m0": torch.ones(2, 3).to(torch.float8_e8m0fnu),
               "i32": torch.arange(6, dtype=torch.int32), "i64": torch.arange(6), "f32": torch.ones(2),
               "none": torch.ones(0, 3, dtype=torch.bfloat16), "i8": torch.ones(2, dtype=torch.int8)}
    save_file(tensors, tmp_path / "x.safetensors")
    stored = read_header(tmp_path / "x.safetensors")
    for name in ("e4m3", "e8m0", "i32", "i64"):
        assert np.array_equal(stored[name].load_raw().astype(np.float32), tensors[name].float().numpy())
        with pytest.raises(InputError, match=rf"tensor {name} has dtype \w+; expected one of F64, F32, F16, BF16; deq"):
            stored[name].load()
    assert stored["f32"].load().tolist() == stored["f32"].load_raw().tolist() == [1, 1]
    assert stored["none"].load().shape == (0, 3)
    with pytest.raises(InputError, match=r"tensor i8 has dtype I8; expected one of F64"):
        stored["i8"].load_raw()
