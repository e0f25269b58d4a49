"""Whether this machine's int8 products are right: where they are not, `--quantization int8` is refused."""

import pytest
import torch

from cairn.errors import ConfigError
from cairn.kernels.cpu.onednn import check_int8
from cairn.kernels.cpu.panels import has_panels

__all__ = ["NEEDS_INT8", "onednn_is_right"]


def onednn_is_right() -> bool:
    try:
        check_int8()
    except ConfigError:
        return False
    return True


NEEDS_INT8 = pytest.mark.skipif(
    not (has_panels(torch.int8) or onednn_is_right()),
    reason="needs AVX2, VNNI or AMX: elsewhere --quantization int8 is refused",
)
