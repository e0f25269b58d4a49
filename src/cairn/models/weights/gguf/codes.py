"""ggml's blocks of quantized numbers (structs of its ggml-common.h) as codes with scales, of which products are
made without dequantizing them. Each is the number that the `gguf` package makes of it, bit for bit."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from cairn.kernels.quantized import QuantizedWeight

_SUPER = 256
"""Numbers of a block of a K-quant."""


def pack_blocks(type_name: str, blocks: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """Whole rows of blocks, uint8 [rows, bytes], of one of `CODED`."""
    block_bytes, unpack = CODED[type_name]
    fields = unpack(blocks.view(len(blocks), -1, block_bytes))
    zero, bits = fields.pop("zero", 0), fields.pop("bits", 4)
    # Group by group -> [rows, columns].
    tensors = {name: part.reshape(len(blocks), -1) for name, part in fields.items()}
    return QuantizedWeight(dtype=dtype, bits=bits, zero=zero, **tensors)


def _split(part: Tensor, *sizes: int) -> Tensor:
    """[..., n] -> [..., *sizes]."""
    return part.view(*part.shape[:-1], *sizes)


def _pairs(codes: Tensor) -> Tensor:
    """Codes of four bits, two a byte, the first of both in the lower bits."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def _halves(nibbles: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2, n] codes: those in the lower bits come first, all of them."""
    return torch.stack([nibbles & 15, nibbles >> 4], dim=-2)


def _float16(blocks: Tensor, begin: int) -> Tensor:
    """[rows, blocks, 1]."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16)


def _q8_0(blocks: Tensor) -> dict[str, Any]:
    # From int8 to codes whose zero is 128.
    return {"codes": blocks[..., 2:] ^ 128, "scales": _float16(blocks, 0), "zero": 128, "bits": 8}


def _q4_0(blocks: Tensor) -> dict[str, Any]:
    return {"codes": _pairs(_halves(blocks[..., 2:]).flatten(-2)), "scales": _float16(blocks, 0), "zero": 8}


def _q4_1(blocks: Tensor) -> dict[str, Any]:
    codes = _pairs(_halves(blocks[..., 4:]).flatten(-2))
    return {"codes": codes, "scales": _float16(blocks, 0), "minimums": _float16(blocks, 2)}


def _fifth_bits(blocks: Tensor) -> Tensor:
    """Of 32 numbers, in four bytes: [..., 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[..., None] >> shifts) & 1).flatten(-2) << 4


def _q5_0(blocks: Tensor) -> dict[str, Any]:
    codes = _halves(blocks[..., 6:]).flatten(-2) | _fifth_bits(blocks[..., 2:6])
    return {"codes": codes, "scales": _float16(blocks, 0), "zero": 16, "bits": 8}


def _q5_1(blocks: Tensor) -> dict[str, Any]:
    codes = _halves(blocks[..., 8:]).flatten(-2) | _fifth_bits(blocks[..., 4:8])
    return {"codes": codes, "scales": _float16(blocks, 0), "minimums": _float16(blocks, 2), "bits": 8}


def _two_levels(blocks: Tensor) -> dict[str, Any]:
    """Scales and minimums of Q4_K and Q5_K: eight of each in six bits, and a factor for all of either."""
    first, second, third = _split(blocks[..., 4:16], 3, 4).unbind(-2)
    return {
        "scales": torch.cat([first & 63, (third & 15) | (first >> 6) << 4], dim=-1),
        "minimums": torch.cat([second & 63, third >> 4 | (second >> 6) << 4], dim=-1),
        "factors": _float16(blocks, 0).float(),
        "minimum_factors": _float16(blocks, 2).float().neg(),
    }


def _q4_k(blocks: Tensor) -> dict[str, Any]:
    codes = _halves(_split(blocks[..., 16:], 4, 32)).flatten(-3)
    return {"codes": _pairs(codes), **_two_levels(blocks)}


def _q5_k(blocks: Tensor) -> dict[str, Any]:
    nibbles = _halves(_split(blocks[..., 48:], 4, 32)).flatten(-3, -2)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    codes = nibbles | ((blocks[..., None, 16:48] >> shifts) & 1) << 4
    return {"codes": codes, **_two_levels(blocks), "bits": 8}


def _q6_k(blocks: Tensor) -> dict[str, Any]:
    # Of each half of a block: [2, 2, 32] nibbles of which the lower ones come first, and four times two upper bits.
    low = _split(_halves(_split(blocks[..., :128], 2, 64)), 2, 32).flatten(-3, -2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (_split(blocks[..., 128:192], 2, 1, 32) >> shifts) & 3
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    factors = _float16(blocks, 208).float()
    return {"codes": low | high << 4, "scales": scales, "factors": factors, "zero": 32, "bits": 8}


CODED: Mapping[str, tuple[int, Callable[[Tensor], dict[str, Any]]]] = MappingProxyType(
    {
        "Q4_0": (18, _q4_0),
        "Q4_1": (20, _q4_1),
        "Q5_0": (22, _q5_0),
        "Q5_1": (24, _q5_1),
        "Q8_0": (34, _q8_0),
        "Q4_K": (144, _q4_k),
        "Q5_K": (176, _q5_k),
        "Q6_K": (210, _q6_k),
    }
)
"""By ggml's name: bytes of a block, and what reads blocks [rows, blocks, bytes]."""
