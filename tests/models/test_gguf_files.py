"""What a GGUF file may look like: in parts, and what is refused, by name, before a tensor is read."""

import struct
from collections.abc import Callable
from itertools import count
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from cairn.check.report import check
from cairn.cli import main
from cairn.errors import ModelError
from cairn.models.registry import open_model
from cairn.models.weights.gguf.header import read_header
from models.gguf_files import write_gguf
from models.test_gguf import load_all, opened


@pytest.fixture(scope="module")
def whole(made_model, tmp_path_factory) -> Path:
    """A file that is as it should be."""
    return write_gguf(made_model("qwen3_5"), tmp_path_factory.mktemp("gguf") / "whole.gguf", "Q4_K")


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `cairn check` says, which ends with 2; a server is refused alike."""
    assert main(["check", str(path)]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said and path.name in said
    with pytest.raises(ModelError):
        load_all(open_model(path))
    return said


# -- whole files -----------------------------------------------------------------------------------------------------


def test_a_file_is_checked_from_its_header_alone(whole: Path, tmp_path, capsys) -> None:
    """The tensors' bytes are a hole."""
    header = whole.read_bytes()[: read_header(whole).tensors["token_embd.weight"].begin]
    hollow = tmp_path / "hollow.gguf"
    with hollow.open("wb") as file:
        file.write(header)
        file.truncate(whole.stat().st_size)
    assert main(["check", str(hollow)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "qwen3_5_text, 4 layers" in said and "Q4_K" in said and "every one accounted for" in said
    assert "of Q4_K kept as stored" in said and "in gguf, norms in bfloat16" in said
    assert main(["check", "--gpu", "h100", str(hollow)]) == 0
    assert "of Q4_K kept as stored" in " ".join(capsys.readouterr().out.split())
    assert check(hollow).parameters == check(whole).parameters


def test_what_is_not_served_is_named(made_model, tmp_path, capsys) -> None:
    """A tensor too many, one too few, and a type that is not read: a report says all of it."""

    def rename(name: str) -> str:
        return "blk.1.ffn_extra.weight" if name == "blk.1.ffn_up.weight" else name

    path = write_gguf(made_model("qwen3_5"), tmp_path / "renamed.gguf", rename=rename)
    assert main(["check", str(path)]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "renamed.gguf: blk.1.ffn_extra.weight is not part of this architecture" in said
    assert "model.layers.1.mlp.up_proj.weight [512, 256] (GGUF) is missing" in said and "download it again" in said
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight \[512, 256\] \(GGUF\) is missing"):
        load_all(open_model(path))


def test_a_type_that_is_not_read_is_named(made_model, tmp_path, capsys) -> None:
    def add(writer: GGUFWriter) -> None:
        blocks = np.zeros((256, 2 * 50), np.uint8)
        writer.add_tensor("blk.0.ffn_down.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.IQ1_S)

    rename = {"blk.0.ffn_down.weight": None}
    path = write_gguf(
        made_model("qwen3_5"), tmp_path / "iq.gguf", change=add, rename=lambda name: rename.get(name, name)
    )
    assert main(["check", str(path)]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "iq.gguf: model.layers.0.mlp.down_proj.weight is IQ1_S; only F32, F16, BF16, Q4_0" in said
    with pytest.raises(ModelError, match="is IQ1_S; only"):
        load_all(open_model(path))


# -- parts -----------------------------------------------------------------------------------------------------------


def every_third(kept: bool) -> Callable[[str], str | None]:
    """Keeps every third tensor, or all others."""
    numbers = count()
    return lambda name: name if (next(numbers) % 3 == 0) == kept else None


@pytest.fixture
def split(made_model, tmp_path) -> tuple[Path, Path]:
    """A model in two files."""
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))

    def part(number: int) -> Callable[[GGUFWriter], None]:
        def say(writer: GGUFWriter) -> None:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", 2)
            writer.add_int32("split.tensors.count", 56)

        return say

    for number, path in enumerate((first, second)):
        write_gguf(made_model("qwen3_5"), path, "Q8_0", change=part(number), rename=every_third(number == 1))
    return first, second


def test_a_model_in_several_files_is_read(split: tuple[Path, Path], made_model, tmp_path) -> None:
    single = write_gguf(made_model("qwen3_5"), tmp_path / "single.gguf", "Q8_0")
    parts, wanted = opened(split[0]), opened(single)
    tensors, others = load_all(parts), load_all(wanted)
    assert tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in others)
    assert check(split[0]).num_files == 2
    assert parts.transfer_facts()["weights"] == wanted.transfer_facts()["weights"]


def test_a_part_that_is_missing_is_named(split: tuple[Path, Path], capsys) -> None:
    first, second = split
    second.rename(second.with_name("elsewhere.gguf"))
    assert "m-00002-of-00002.gguf: this file is missing" in refused_by(first, capsys)
    assert "the model is split into 2 files, which must be called" in refused_by(
        second.with_name("elsewhere.gguf"), capsys
    )


def refused_by(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["check", str(path)]) == 2
    return capsys.readouterr().err


def test_the_first_part_is_to_be_named(split: tuple[Path, Path], capsys) -> None:
    assert "name the first of the 2 files, m-00001-of-00002.gguf" in refused(split[1], capsys)


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begin", "written", "said"),
    [
        (0, b"PK\3\4", "is no GGUF file"),
        (4, struct.pack("<I", 1), "is version 1 of GGUF; read are versions 2, 3: convert it again"),
        (4, struct.pack(">I", 3), "is a big-endian file"),
        (8, struct.pack("<Q", 1 << 60), "tensors and"),
        (16, struct.pack("<Q", 1 << 60), "which no model has"),
        (24, struct.pack("<Q", 1 << 62), "is cut short: its header goes on"),
    ],
)
def test_a_damaged_beginning_is_refused(begin: int, written: bytes, said: str, whole: Path, tmp_path, capsys) -> None:
    data = bytearray(whole.read_bytes())
    data[begin : begin + len(written)] = written
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    assert said in refused(path, capsys)


@pytest.mark.parametrize("length", [0, 3, 20, 100, 4000, 90_000])
def test_a_file_that_ends_in_its_header_is_refused(length: int, whole: Path, tmp_path, capsys) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole.read_bytes()[:length])
    assert "damaged" not in refused(path, capsys)


def test_a_file_that_ends_in_a_tensor_is_refused(whole: Path, tmp_path, capsys) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole.read_bytes()[:-5000])
    said = refused(path, capsys)
    assert "is cut short: output.weight ends at byte" in said and "download it again" in said


def test_each_byte_of_a_header_may_be_another(whole: Path, tmp_path) -> None:
    """What is read is a model, or is refused as one that is none."""
    data = whole.read_bytes()
    begin = read_header(whole).tensors["token_embd.weight"].begin
    path, random = tmp_path / "changed.gguf", np.random.default_rng(0)
    for _ in range(60):
        changed = bytearray(data)
        # Of the tensors' names and places, too, which stand at the end.
        for place in (*random.integers(0, 3000, 2), *random.integers(begin - 3000, begin, 2)):
            changed[place] = random.integers(0, 256)
        path.write_bytes(changed)
        try:
            check(path)
        except ModelError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda writer: writer.add_string("general.architecture", "llama"),
            "general.architecture 'llama' is not served; known: falcon-h1",
        ),
        (lambda writer: writer.add_type("mmproj"), "general.type is 'mmproj': this file is a part of a model"),
        (
            lambda writer: writer.add_string("qwen35.ssm.state_size", "four"),
            "qwen35.ssm.state_size must be an integer in 0..1073741824, not 'four'",
        ),
        (lambda writer: writer.add_ssm_group_count(3), "linear_num_key_heads"),
        (lambda writer: writer.add_head_count(1 << 30), "num_attention_heads must be an integer in 1..65536"),
        (lambda writer: writer.add_value_length(32), "qwen35.attention.value_length is 32"),
        (
            lambda writer: (
                writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE) or writer.add_rope_scaling_factor(4.0)
            ),
            "longrope",
        ),
        (lambda writer: writer.kv_data[0].pop("qwen35.ssm.state_size"), "qwen35.ssm.state_size is missing"),
        (lambda writer: writer.kv_data[0].pop("general.architecture"), "general.architecture is missing"),
        (lambda writer: writer.add_uint32("general.alignment", 33), "general.alignment must be a power of two"),
    ],
)
def test_fields_that_are_not_served_are_named(change, said: str, made_model, tmp_path, capsys) -> None:
    path = tmp_path / "said.gguf"
    write_gguf(made_model("qwen3_5"), path, change=change)
    assert said in refused_by(path, capsys)


def test_a_file_that_is_not_there_is_no_name_on_the_hub(tmp_path, capsys) -> None:
    assert "there is no such file" in refused_by(tmp_path / "none.gguf", capsys)


def test_a_file_of_another_kind_is_no_model(tmp_path, capsys) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    assert "is a file: name the folder that it is in, or a .gguf file" in refused_by(path, capsys)
