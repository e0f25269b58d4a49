"""A fingerprint of a checkpoint's weights that does not read them all: equal on two servers with the same weights."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from cairn.errors import ModelError
from cairn.models.weights.gguf.checkpoint import open_gguf
from cairn.models.weights.gguf.header import is_gguf
from cairn.models.weights.quantization import Quantization, logical_names, used_tensors
from cairn.models.weights.tensor_headers import TensorHeader, read_headers, read_offsets

_IDENTITY = b"cairn/weights/1"
_SAMPLE_BYTES = 64
_SAMPLES = 8


def weights_identity(folder: Path, names: Iterable[str], quantization: Quantization | None = None) -> str:
    """sha256, in hex, over name, dtype, shape and 8 samples of 64 bytes of every stored tensor that `names` are made
    of, sorted by name.

    The samples are spread evenly over the tensor's bytes, from the first to the last; a tensor of at most 512 bytes
    is read whole. So weights that were trained further differ, as training moves numbers everywhere in a tensor; a
    change of a few single numbers may go unseen. How the tensors are spread over files makes no difference; storing
    them in another dtype does. Takes a few thousand small reads, whatever the model's size. Raises ModelError.
    """
    headers = read_headers(folder)
    digest = hashlib.sha256(_IDENTITY)
    expected = list(names)
    stored = logical_names(headers, quantization)
    if missing := [name for name in expected if name not in stored]:
        raise ModelError(f"{folder}: {missing[0]} is missing")
    used = sorted(used_tensors(headers, expected, quantization))
    samples = _sample_gguf(folder, used) if is_gguf(folder) else _sample_folder(folder, headers, used)
    for name in used:
        header = headers[name]
        for part in (name.encode(), header.dtype.encode(), str(header.shape).encode(), samples[name]):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _sample_folder(folder: Path, headers: Mapping[str, TensorHeader], names: Sequence[str]) -> dict[str, bytes]:
    samples: dict[str, bytes] = {}
    for file in sorted({headers[name].file for name in names}):
        try:
            with (folder / file).open("rb") as opened:
                offsets = read_offsets(opened)
                samples |= {name: _sample(opened, *offsets[name]) for name in names if headers[name].file == file}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ModelError(f"{folder / file}: cannot be read: {error}") from error
    return samples


def _sample_gguf(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Of each of the stored tensors' parts that make up a published one."""
    checkpoint, samples = open_gguf(path), dict.fromkeys(names, b"")
    for file in sorted({tensor.file for tensor in checkpoint.tensors.values()}):
        try:
            with path.with_name(file).open("rb") as opened:
                for name in names:
                    for rows in checkpoint.views[name].pieces:
                        tensor = checkpoint.tensors[rows.tensor]
                        if tensor.file == file:
                            samples[name] += _sample(opened, *tensor.place(rows.begin, rows.end))
        except OSError as error:
            raise ModelError(f"{path.with_name(file)}: cannot be read: {error}") from error
    return samples


def _sample(file: BinaryIO, begin: int, length: int) -> bytes:
    if length <= _SAMPLES * _SAMPLE_BYTES:
        file.seek(begin)
        return file.read(length)
    samples = []
    for number in range(_SAMPLES):
        file.seek(begin + (length - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
        samples.append(file.read(_SAMPLE_BYTES))
    return b"".join(samples)
