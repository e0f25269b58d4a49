"""Whether this machine's int8 products are right: where they are not, `--quantization int8` is refused."""

import pytest

from cairn.errors import ConfigError
from cairn.kernels.cpu.onednn import check_int8

__all__ = ["NEEDS_INT8"]


def are_right() -> bool:
    try:
        check_int8()
    except ConfigError:
        return False
    return True


NEEDS_INT8 = pytest.mark.skipif(not are_right(), reason="needs VNNI or AMX: elsewhere --quantization int8 is refused")
