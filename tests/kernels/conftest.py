from collections.abc import Iterator

import pytest
import torch

from kernels.backends import INTERPRETED

if INTERPRETED:
    from kernels.interpreter import chain_products, mend_bfloat16

    mend_bfloat16()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def products_as_on_a_gpu() -> Iterator[None]:
    """Interpreted float32 products have the order of terms that compiled ones have."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            chain_products(patch)
        yield
