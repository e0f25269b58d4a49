"""GGUF files are served as the checkpoints that they were made of: config, tensors and answers; what is quantized as
the numbers that the `gguf` package makes of it."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from torch import Tensor

from cairn.check.reference import TransformersReference
from cairn.check.report import check
from cairn.models.registry import OpenModel, open_model
from cairn.models.sharding import TensorShard
from cairn.models.weights.loader import WeightReader
from doubles.thread_ranks import thread_ranks
from engine.test_exactness import TEXT
from models.covered import GGUF
from models.gguf_files import write_gguf
from models.test_served_int8 import Served, distance
from tiers import first, first_of

FAMILIES = tuple(family for family in GGUF.families if family != "falcon_h1")
"""Falcon-H1's weights are stored with its multipliers, so they are others."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTIZED = ("Q4_K", "Q6_K", "Q8_0", "Q5_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


@pytest.fixture(scope="module")
def written(made_model, tmp_path_factory) -> Callable[..., Path]:
    """A family and a type -> its tiny checkpoint as a GGUF file, which nobody changes."""
    made: dict[tuple[str, str], Path] = {}

    def write(family: str, type_name: str = "F32") -> Path:
        if (family, type_name) not in made:
            out = tmp_path_factory.mktemp("gguf") / f"{family}-{type_name}.gguf"
            made[family, type_name] = write_gguf(made_model(family), out, type_name)
        return made[family, type_name]

    return write


def opened(folder: Path) -> OpenModel:
    """With the head that drafts, where there is one."""
    model = open_model(folder)
    return model.with_head() if model.config.num_mtp_layers else model


def load_all(model: OpenModel, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """All tensors, of which none may be missing or foreign."""
    with WeightReader(model.folder, dtype, model.family.float32_tensors, model.quantization) as reader:
        expected = model.tensors(reader.headers)
        reader.verify(expected)
        return {name: reader.load(name, shape) for name, shape in expected.items()}


# -- the same checkpoint ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", first(3, FAMILIES))
def test_a_file_holds_the_checkpoint_that_it_was_made_of(family: str, made_model, written) -> None:
    """Bit for bit, but for centred norms, of which one part in 2**24 is lost where 1 is added."""
    ours, theirs = opened(written(family)), opened(made_model(family))
    differing = {name for name in theirs.config.__slots__ if getattr(ours.config, name) != getattr(theirs.config, name)}
    # Of Nemotron-H, which its answers do not depend on.
    assert differing <= {"pad_token_id"} and ours.dtype == theirs.dtype
    stored, wanted = load_all(ours), load_all(theirs)
    assert stored.keys() == wanted.keys()
    for name, values in wanted.items():
        if ours.family.model_type.startswith("qwen3_5") and "norm" in name:
            assert torch.allclose(stored[name], values, rtol=0, atol=2**-24), name
        elif name.endswith("A_log"):
            assert torch.allclose(stored[name], values, rtol=1e-6, atol=1e-7), name
        else:
            assert torch.equal(stored[name], values), name


@pytest.mark.parametrize("family", first(2, ("falcon_h1", "qwen3_5", "nemotron_h", *FAMILIES[3:], FAMILIES[1])))
def test_it_answers_as_the_checkpoint(family: str, made_model, written) -> None:
    served, wanted = (Served(folder, "auto").logits() for folder in (written(family), made_model(family)))
    assert distance(served, wanted) < 1e-5


@pytest.mark.more
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_transformers_answers_alike(family: str, written) -> None:
    """Where it reads the format, too, for which it wants a package that is none of ours."""
    pytest.importorskip("accelerate")
    reference = TransformersReference(written(family, "Q8_0"), "float32")
    length = 100
    wanted = reference.logprobs(TEXT[: length - 1], TEXT[length - 1 : length])[0]
    logits = Served(written(family, "Q8_0"), "float32").engine().ask(TEXT[: length - 1], 1)[0]
    assert torch.allclose(logits.log_softmax(-1), wanted, atol=1e-3)


def test_positions_are_scaled_as_the_file_says(made_model, written, tmp_path) -> None:
    def yarn(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(8192)

    plain = open_model(written("qwen3"))
    scaled = open_model(write_gguf(made_model("qwen3"), tmp_path / "yarn.gguf", change=yarn))
    assert plain.config.rope_scaling is None and scaled.config.rope_scaling is not None
    assert dict(scaled.config.rope_scaling.settings)["factor"] == 4.0
    assert scaled.config.max_model_len == 32768


# -- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_name", PLAIN)
def test_plain_numbers_are_served_as_they_are(type_name: str, made_model, written) -> None:
    """float16 is widened to float32, as it is of safetensors."""
    model = open_model(written("qwen3_5", type_name))
    assert model.dtype == (torch.bfloat16 if type_name == "BF16" else torch.float32)
    stored, wanted = load_all(model), load_all(open_model(made_model("qwen3_5")))
    for name, values in wanted.items():
        if values.dim() == 2:
            assert torch.equal(stored[name], values.to(PLAIN[type_name]).float()), name


@pytest.mark.parametrize(
    ("type_name", "family"),
    first_of(
        [("Q4_K", "qwen3_5"), ("Q6_K", "granitemoehybrid"), ("Q8_0", "lfm2_moe")],
        QUANTIZED,
        ("qwen3_5", "granitemoehybrid", "lfm2_moe", "qwen3_5_moe", "nemotron_h"),
    ),
)
def test_quantized_numbers_are_those_that_the_package_makes(type_name: str, family: str, written, tmp_path) -> None:
    """Bit for bit as of a file that has them in float32, whatever their order."""
    file = written(family, type_name)
    plain = dequantize_file(file, tmp_path / "plain.gguf")
    quantized, wanted = load_all(open_model(file)), load_all(open_model(plain))
    assert quantized.keys() == wanted.keys()
    assert all(torch.equal(quantized[name], values) for name, values in wanted.items())
    assert check(file).stored_dtypes[type_name] > 20
    assert open_model(file).dtype == torch.bfloat16


def dequantize_file(file: Path, out: Path) -> Path:
    """The same file with all tensors in float32, by the package's reader and its rules."""
    read = GGUFReader(file)
    writer = GGUFWriter(out, str(read.fields["general.architecture"].contents()))
    for name, field in read.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in read.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize("family", ["qwen3_5", "granitemoehybrid"])
def test_a_shard_is_a_part_of_the_whole(family: str, written) -> None:
    """Rows in another order, columns in another order, and the rows of stacks that two tensors make up."""
    model = open_model(written(family, "Q4_K"))
    whole = load_all(model)
    with WeightReader(model.folder, torch.float32) as reader:
        for name, values in whole.items():
            for dim, length in enumerate(values.shape if values.dim() > 1 else ()):
                shard = TensorShard(dim, ((length // 4, length // 2), (length - length // 4, length)))
                parts = [values.narrow(dim, begin, end - begin) for begin, end in shard.slices]
                loaded = reader.load(name, tuple(values.shape), shard)
                assert torch.equal(loaded, torch.cat(parts, dim)), (name, dim)


def test_a_quantized_file_answers_nearly_as_the_checkpoint(made_model, written) -> None:
    wanted = Served(made_model("qwen3_5"), "auto").logits()
    far = [distance(Served(written("qwen3_5", name), "float32").logits(), wanted) for name in ("Q8_0", "Q6_K", "Q4_K")]
    assert far == sorted(far) and far[0] < 0.05 and far[2] < 0.4


def test_every_ranks_share_is_that_of_the_same_numbers(written, tmp_path) -> None:
    """Cuts fall inside blocks and inside heads that are stored in another order."""
    file = written("qwen3_5", "Q8_0")
    plain = dequantize_file(file, tmp_path / "plain.gguf")
    ranks = [
        [open_model(each, "float32").build(exact=True, communicator=rank) for rank in thread_ranks(2)]
        for each in (file, plain)
    ]
    for quantized, wanted in zip(*ranks, strict=True):
        assert len(quantized.linears) == len(wanted.linears) > 10
        for ours, theirs in zip(quantized.linears, wanted.linears, strict=True):
            assert torch.equal(ours.weight, theirs.weight)
