"""Quantized matrices of GGUF files stay in codes where there are products with these: the same numbers, in about as
many bytes as the file has."""

from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels.quantized import QuantizedWeight
from cairn.models.registry import OpenModel, open_model
from cairn.models.sharding import TensorShard
from cairn.models.weights.gguf import codes
from cairn.models.weights.gguf.checkpoint import open_gguf
from cairn.models.weights.gguf.codes import CODED, empty_codes, fill_codes, pack_blocks, take_columns
from cairn.models.weights.loader import WeightReader
from cairn.models.weights.quantization import describe_codes
from models.gguf_blocks import encode
from models.gguf_files import write_gguf
from models.test_served_int8 import Served, distance
from tiers import first_of

MOST = {"Q4_K": 1.06, "Q6_K": 1.32, "Q8_0": 1.0, "Q4_0": 1.0, "Q4_1": 1.0, "Q5_K": 1.05, "Q5_0": 1.0, "Q5_1": 1.0}
"""Bytes of codes and scales over those of the file's blocks."""
FAMILIES = ("qwen3_5", "granitemoehybrid", "lfm2_moe", "nemotron_h", "qwen3_5_moe")


@pytest.fixture(scope="module")
def written(made_model, tmp_path_factory) -> Callable[[str, str], Path]:
    """A family and a type -> its tiny checkpoint as a GGUF file, which nobody changes."""
    made: dict[tuple[str, str], Path] = {}

    def write(family: str, type_name: str) -> Path:
        if (family, type_name) not in made:
            out = tmp_path_factory.mktemp("gguf") / f"{family}-{type_name}.gguf"
            made[family, type_name] = write_gguf(made_model(family), out, type_name)
        return made[family, type_name]

    return write


def matrices(model: OpenModel) -> dict[str, tuple[int, ...]]:
    """Those that products are made of."""
    stored = open_gguf(model.folder).views
    spec = model.family.spec(model.config, stored)
    return {name: tensor.shape for name, tensor in spec.tensors(0, 1).items() if tensor.is_matrix}


@pytest.mark.parametrize(
    ("type_name", "family"),
    first_of(
        [
            ("Q4_K", "qwen3_5"),
            ("Q6_K", "granitemoehybrid"),
            ("Q8_0", "qwen3_5"),
        ],
        MOST,
        FAMILIES,
    ),
)
def test_codes_are_the_numbers_of_the_file(type_name: str, family: str, written) -> None:
    """Bit for bit, and their bytes are known without reading them."""
    model = open_model(written(family, type_name), keeps="codes")
    assert model.served_quantization == "gguf"
    views, num_codes = open_gguf(model.folder).views, 0
    with WeightReader(model.folder, torch.float32, (), model.quantization) as reader:
        describe = describe_codes(reader.headers, model.quantization, torch.float32)
        for name, shape in matrices(model).items():
            codes, described = reader.load_codes(name, shape), describe(name, shape)
            assert (codes is None) == (views[name].type_name == "F32") == (described is None), name
            if codes is None or described is None:
                continue
            num_codes += 1
            assert torch.equal(codes.dequantize(), reader.load(name, shape)), name
            assert codes.nbytes == described.nbytes <= MOST[type_name] * views[name].num_bytes + 1, name
    assert num_codes > 8


@pytest.mark.parametrize(("family", "type_name"), [("qwen3_5", "Q8_0"), ("granitemoehybrid", "Q4_K")])
def test_a_shard_of_codes_is_a_part_of_the_whole(family: str, type_name: str, written) -> None:
    """Rows wherever they are cut, columns between blocks; elsewhere they are dequantized."""
    model = open_model(written(family, type_name), keeps="codes")
    views = open_gguf(model.folder).views
    block = 32 if type_name == "Q8_0" else 256
    cut_inside = 0
    with WeightReader(model.folder, torch.float32, (), model.quantization) as reader:
        for name, shape in matrices(model).items():
            if views[name].type_name == "F32" or shape[-2] < 12:
                continue
            whole = reader.load(name, shape)
            rows = TensorShard(len(shape) - 2, ((1, 7), (shape[-2] - 5, shape[-2])))
            parts = [whole.narrow(rows.dim, begin, end - begin) for begin, end in rows.slices]
            codes = reader.load_codes(name, shape, rows)
            assert codes is not None and torch.equal(codes.dequantize(), torch.cat(parts, rows.dim)), name
            half = shape[-1] // 2
            codes = reader.load_codes(name, shape, TensorShard(len(shape) - 1, ((half, shape[-1]),)))
            if half % block and views[name].column_order is None:
                cut_inside += codes is None
            else:
                assert codes is not None and torch.equal(codes.dequantize(), whole[..., half:]), name
    assert (cut_inside > 0) == (family == "granitemoehybrid")


@pytest.mark.parametrize(("family", "type_name"), [("qwen3_5", "Q4_K"), ("granitemoehybrid", "Q8_0")])
def test_codes_answer_as_the_numbers_they_stand_for(family: str, type_name: str, written) -> None:
    file = written(family, type_name)
    kept, plain = Served(file, "float32"), Served(file, "float32")
    kept.opened = open_model(file, "float32", keeps="codes")
    kept.models = {False: kept.opened.build(exact=False)}
    assert kept.opened.stays_as_stored and not plain.opened.stays_as_stored
    assert distance(kept.logits(), plain.logits()) < 0.05


def test_bytes_of_weights_are_counted_as_they_are_served(written) -> None:
    """All that is quantized is in codes, the embedding with it; the rest in the model's dtype."""
    model = open_model(written("qwen3_5", "Q8_0"), keeps="codes")
    views = open_gguf(model.folder).views.values()
    in_codes = sum(view.num_bytes for view in views if view.type_name == "Q8_0")
    rest = sum(prod(view.shape) for view in views if view.type_name != "Q8_0")
    counted = model.weight_bytes(model.stored_tensors())
    assert in_codes + 2 * rest <= counted < in_codes + 4 * rest


def test_an_embedding_in_codes_gives_the_same_vectors(written) -> None:
    """Tied to the output, too, of which products are made."""
    for family in ("qwen3_5", "lfm2_moe"):
        kept, plain = (
            open_model(written(family, "Q8_0"), "float32", keeps=keeps).build(exact=False) for keeps in ("codes", None)
        )
        tokens = torch.tensor([5, 0, 4095, 77])
        assert isinstance(kept.embedding.weight, QuantizedWeight) and isinstance(plain.embedding.weight, Tensor)
        assert torch.equal(kept.embedding(tokens), plain.embedding(tokens))


def test_several_types_in_one_matrix_are_dequantized(made_model, tmp_path) -> None:
    """Gate and up, which one tensor is published for."""
    path = write_gguf(
        made_model("granitemoehybrid"),
        tmp_path / "mixed.gguf",
        lambda name: "Q6_K" if "ffn_up" in name else "Q4_K",
    )
    model = open_model(path, keeps="codes")
    name = "model.layers.0.shared_mlp.input_linear.weight"
    view = open_gguf(path).views[name]
    assert view.type_name == "Q4_K+Q6_K"
    with WeightReader(path, torch.float32, (), model.quantization) as reader:
        assert reader.load_codes(name, view.shape) is None
        loaded = reader.load(name, view.shape)
        single = open_model(write_gguf(made_model("granitemoehybrid"), tmp_path / "q4.gguf", "Q4_K"))
    with WeightReader(single.folder, torch.float32) as other:
        assert torch.equal(loaded[:256], other.load(name, view.shape)[:256])
        assert not torch.equal(loaded[256:], other.load(name, view.shape)[256:])


def test_its_quantization_may_be_said(written) -> None:
    """As users of vLLM do with `-q`. What it is not is refused with what to do."""
    for type_name in ("F16", "Q8_0"):
        assert open_model(written("qwen3_5", type_name), quantization="gguf").served_quantization is None
        assert open_model(written("qwen3_5", type_name), quantization="int8").served_quantization == "int8"
        with pytest.raises(ConfigError, match=r"--quantization awq: the checkpoint is .*without this flag"):
            open_model(written("qwen3_5", type_name), quantization="awq")


def test_codes_are_one_kind(written) -> None:
    """Rows of several matrices make one product."""
    model = open_model(written("qwen3_5", "Q4_K"), keeps="codes")
    with WeightReader(model.folder, torch.float32, (), model.quantization) as reader:
        names = [f"model.layers.3.self_attn.{part}_proj.weight" for part in "qkv"]
        kinds = {loaded.kind for name in names if (loaded := reader.load_codes(name, matrices(model)[name]))}
    assert len(kinds) == 1


@pytest.mark.parametrize("has_loops", [True, False])
@pytest.mark.parametrize("type_name", CODED)
def test_blocks_are_taken_apart_wherever_they_lie(
    type_name: str, has_loops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By loops or by numpy: any bits, of rows that are parts of longer ones, into rows of a larger matrix."""
    if not has_loops:
        monkeypatch.setattr(codes, "compiled_loops", lambda name: None)
    size, _ = CODED[type_name]
    rows = np.random.default_rng(0).integers(0, 256, (5, 4 * size + 3), dtype=np.uint8)[:, size : 4 * size]
    made = empty_codes(type_name, 9, 3 * size, torch.float32)
    before = made.changed(torch.clone).row_tensors()
    fill_codes(type_name, rows, made, 2)
    wanted = pack_blocks(type_name, np.ascontiguousarray(rows), torch.float32).row_tensors()
    for name, part in made.row_tensors().items():
        assert torch.equal(bits(part[2:7]), bits(wanted[name]))
        assert torch.equal(bits(part[:2]), bits(before[name][:2]))
        assert torch.equal(bits(part[7:]), bits(before[name][7:]))


def bits(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.uint8)


def test_columns_of_heads_are_put_in_order_whatever_blocks_they_are_in() -> None:
    """Two heads of 128 in a block of 256, as Qwen3.5's output projections have them: each has its block's factors."""
    order = np.arange(512).reshape(2, 2, 128).swapaxes(0, 1).reshape(-1)
    rows = np.random.default_rng(0).normal(size=(8, 512)).astype(np.float32)
    for type_name in ("Q4_K", "Q5_K", "Q6_K", "Q8_0"):
        whole = pack_blocks(type_name, encode(rows, type_name), torch.float32)
        ordered = take_columns(whole, order[::128] // 128, 128)
        assert torch.equal(ordered.dequantize(), whole.dequantize()[:, torch.from_numpy(order)])
        cut = take_columns(whole, order[256::128] // 128, 128)
        assert torch.equal(cut.dequantize(), whole.dequantize()[:, torch.from_numpy(order[256:])])
