"""Reading a checkpoint folder: what is accepted, and one clear error for each way it can be broken."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cairn.errors import ModelError
from cairn.models.decoder_builder import Execution, build_decoder
from cairn.models.families import FAMILIES, family_of
from cairn.models.random_weights.make_model import make_model
from cairn.models.registry import open_model
from cairn.models.sharding import TensorShard
from cairn.models.weights.loader import WeightReader, account, read_config, serving_dtype
from cairn.models.weights.tensor_headers import read_headers

INDEX = "model.safetensors.index.json"
SHAPES = {"a.weight": (2, 3), "b.weight": (4,), "b.D": (5,)}


def values(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) / 8 for name, shape in SHAPES.items()
    }


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(values(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """a.weight in one file, the rest in another."""
    tensors = values()
    save_file({"a.weight": tensors.pop("a.weight")}, tmp_path / "one.safetensors")
    save_file(tensors, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a.weight": "one.safetensors", **dict.fromkeys(tensors, "two.safetensors")})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_model("nemotron_h", folder)
    return folder


@pytest.mark.parametrize("form", ["single", "sharded"])
def test_both_forms(form: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(form)
    assert {name: header.shape for name, header in read_headers(folder).items()} == SHAPES
    with WeightReader(folder, torch.float32) as reader:
        reader.verify(SHAPES)
        for name, value in values().items():
            assert torch.equal(reader.load(name, SHAPES[name]), value)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("served", [torch.bfloat16, torch.float32])
def test_dtypes_are_converted(tmp_path: Path, stored: torch.dtype, served: torch.dtype) -> None:
    save_file(values(stored), tmp_path / "model.safetensors")
    with WeightReader(tmp_path, served, float32=("D",)) as reader:
        for name, value in values(stored).items():
            found = reader.load(name, SHAPES[name])
            assert found.dtype == (torch.float32 if name == "b.D" else served)
            assert torch.equal(found, value.to(found.dtype))


def test_tensors_outlive_the_file(single: Path) -> None:
    with WeightReader(single, torch.float32) as reader:
        found = reader.load("a.weight", (2, 3))
    with (single / "model.safetensors").open("r+b") as file:
        file.seek(-6 * 4 - 9 * 4, 2)
        file.write(b"\xff" * 60)
    assert torch.equal(found, values()["a.weight"])


def truncate(folder: Path) -> None:
    path = folder / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def cut_header(folder: Path) -> None:
    (folder / "two.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")


def huge_header(folder: Path) -> None:
    (folder / "two.safetensors").write_bytes(b"\xff" * 64)


def repeat_tensor(folder: Path) -> None:
    save_file({"a.weight": torch.zeros(2, 3), **values()}, folder / "two.safetensors")


DAMAGE: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: (folder / "two.safetensors").unlink(), "the shard is missing, and b.weight with it, by"),
    (truncate, "two.safetensors: damaged or cut short"),
    (cut_header, "two.safetensors: damaged or cut short"),
    (huge_header, "two.safetensors: damaged or cut short"),
    (lambda folder: (folder / "two.safetensors").write_bytes(b""), "two.safetensors: damaged or cut short"),
    (repeat_tensor, "a.weight is both in one.safetensors and in two.safetensors"),
    (lambda folder: (folder / INDEX).write_text("{"), f"{INDEX}: not valid JSON"),
    (lambda folder: (folder / INDEX).write_text("[]"), f"{INDEX}: must hold a JSON object, not a list"),
    (lambda folder: (folder / INDEX).write_text("{}"), "weight_map must be an object"),
    (lambda folder: write_index(folder, ["one.safetensors"]), "weight_map must be an object"),
    (lambda folder: write_index(folder, {"a": 1}), "a is said to be in 1; it must be a .safetensors file"),
    (lambda folder: write_index(folder, {"a": "../x.safetensors"}), "a is said to be in '../x.safetensors'"),
    (lambda folder: write_index(folder, {"a": "/x.safetensors"}), "a is said to be in '/x.safetensors'"),
    (lambda folder: write_index(folder, {"a": "one.bin"}), "a is said to be in 'one.bin'"),
    (
        lambda folder: write_index(folder, {"a": "one.safetensors", "a.weight": "one.safetensors"}),
        "a should be in one.safetensors, but is not there",
    ),
    (
        lambda folder: write_index(folder, {f"t{i}": f"{i}.safetensors" for i in range(10_001)}),
        "more than 10000 shards",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_damaged_folder(sharded: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(sharded)
    with pytest.raises(ModelError) as caught:
        read_headers(sharded)
    assert message in str(caught.value)
    with pytest.raises(ModelError):
        WeightReader(sharded, torch.float32)


def test_pickles_are_refused(tmp_path: Path) -> None:
    torch.save(values(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle, which could run code; convert it"):
        read_headers(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json is there"):
        read_headers(tmp_path)


def test_accounting_names_every_tensor(sharded: Path) -> None:
    found = account(read_headers(sharded), {"a.weight": (3, 2), "c.weight": (7,), "b.D": (5,)}, ignored=("nothing.",))
    assert found.problems == (
        "one.safetensors: a.weight has shape [2, 3], config.json makes it [3, 2]",
        "c.weight [7] (safetensors) is missing",
        "two.safetensors: b.weight is not part of this architecture",
    )
    assert account(read_headers(sharded), {"a.weight": (2, 3)}, ignored=("b.",)).num_ignored == 2
    assert not account(read_headers(sharded), {"a.weight": (2, 3)}, ignored=("b.",)).problems


def test_verify_and_load_name_tensor_and_file(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.int8), "b": torch.zeros(3)}, tmp_path / "model.safetensors")
    with WeightReader(tmp_path, torch.float32) as reader:
        with pytest.raises(ModelError, match=r"model\.safetensors: a is I8; only BF16, F16, F32 can be read"):
            reader.load("a", (2,))
        with pytest.raises(ModelError, match=r"model\.safetensors: b has shape \[3\], config\.json makes it \[4\]"):
            reader.load("b", (4,))
        with pytest.raises(ModelError, match=r"c \[1\] \(safetensors\) is missing"):
            reader.load("c", (1,))
        with pytest.raises(ModelError, match=r"a is I8; .*: b is not part of this architecture"):
            reader.verify({"a": (2,)})
        with pytest.raises(ModelError, match=r"and 6 more, see `cairn check`"):
            reader.verify({f"t{i}": (1,) for i in range(9)})


def test_read_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nvidia/model: no such folder; give one that holds config.json"):
        read_config(Path("nvidia/model"))
    with pytest.raises(ModelError, match=r"config\.json is missing; this is not a Hugging Face checkpoint"):
        read_config(tmp_path)
    path = tmp_path / "config.json"
    for text, message in [
        ("{", "config.json: not valid JSON"),
        ("\udcff", "config.json: not valid JSON"),
        ("[" * 100_000, "config.json: not valid JSON"),
        ("[]", "config.json: must hold a JSON object, not a list"),
    ]:
        path.write_text(text, errors="surrogateescape")
        with pytest.raises(ModelError) as caught:
            read_config(tmp_path)
        assert message in str(caught.value)
    with path.open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(ModelError, match=r"config\.json: larger than 64 MiB"):
        read_config(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ModelError, match=r"config\.json: Is a directory"):
        read_config(tmp_path)


def test_serving_dtype() -> None:
    assert serving_dtype({"torch_dtype": "bfloat16"}, "auto") == torch.bfloat16
    assert serving_dtype({"dtype": "float16"}, "auto") == torch.float32
    assert serving_dtype({}, "auto") == torch.float32
    assert serving_dtype({"torch_dtype": "bfloat16"}, "float32") == torch.float32
    for field, wrong in (("torch_dtype", "int8"), ("dtype", 3)):
        with pytest.raises(ModelError, match=rf"json: {field} .* is none of float32, float16, bfloat16"):
            serving_dtype({field: wrong}, "auto")


def test_unknown_architectures() -> None:
    assert family_of({"model_type": "nemotron_h"}) is FAMILIES["nemotron_h"]
    with pytest.raises(ModelError, match=r"model_type 'llama' is not served; known: .*nemotron_h.*qwen3_5_moe"):
        family_of({"model_type": "llama"})
    with pytest.raises(ModelError, match=r"model_type None is not served"):
        family_of({})
    for named in (["NemotronHForSequenceClassification"], "NemotronHForCausalLM", [3]):
        with pytest.raises(
            ModelError, match=r"architectures .* is not served; known for nemotron_h: NemotronHForCausal"
        ):
            family_of({"model_type": "nemotron_h", "architectures": named})


def test_remote_code_is_not_looked_at(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "copy"))
    raw = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    assert open_model(folder).config == open_model(tiny).config
    assert open_model(folder).build(exact=False).vocab_size == 4096


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_takes_every_tensor_of_its_checkpoint(tiny: Path, dtype: Any) -> None:
    model = open_model(tiny, dtype)
    asked: dict[str, tuple[int, ...]] = {}
    with WeightReader(tiny, model.dtype, model.family.float32_tensors) as reader:

        def load(name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> torch.Tensor:
            asked[name] = shape
            return reader.load(name, shape, shard)

        build_decoder(model.family.spec(model.config), load, Execution(False, model.dtype))
    assert asked == model.family.tensors(model.config)
    assert model.build(exact=False).vocab_size == model.config.vocab_size == 4096


def test_build_accounts_for_the_checkpoint_first(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "copy"))
    raw = json.loads((folder / "config.json").read_text()) | {"vocab_size": 4097}
    (folder / "config.json").write_text(json.dumps(raw))
    message = r"embeddings\.weight has shape \[4096, 256\], config\.json makes it \[4097, 256\]"
    with pytest.raises(ModelError, match=message):
        open_model(folder).build(exact=False)
