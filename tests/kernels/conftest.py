import pytest
import torch

from kernels.backends import INTERPRETED

if INTERPRETED:
    from kernels.interpreter import mend_bfloat16

    mend_bfloat16()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)
