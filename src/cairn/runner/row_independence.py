"""What exact mode rests on: a row has the same bits wherever it stands in a product, and beside whatever other rows."""

from collections.abc import Iterable
from typing import cast

import torch

from cairn.errors import ConfigError
from cairn.kernels.contract import ExactKernels
from cairn.layers.linear import Linear


def check_row_independence(linears: Iterable[Linear], seed: int = 0) -> int:
    """Check that a row has the same bits wherever it stands in a product, and beside whatever other rows. Exact mode
    rests on it, and on the CPU it is a property of the library, the processor and the number of threads. Returns the
    number of weight shapes.

    Raises ConfigError that names the shape whose rows depend on their place or on their neighbours.
    """
    by_shape = {(linear.shape, linear.bias is None): linear for linear in linears}
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for linear in by_shape.values():
            kernels = cast(ExactKernels, linear.kernels)
            height = kernels.find_dependent_height(linear.weight, linear.bias, generator)
            if height is not None:
                product = f"--exact: products of {height} rows with a weight of shape {list(linear.shape)}"
                raise ConfigError(f"{product} give a row other bits at another place in the batch {_where(linear)}")
    return len(by_shape)


def _where(linear: Linear) -> str:
    if linear.weight.device.type == "cuda":
        return f"on {torch.cuda.get_device_name(linear.weight.device)}; run without --exact, or with --device cpu"
    threads = torch.get_num_threads()
    return f"on this machine with {threads} threads; run without --exact, or with OMP_NUM_THREADS=1 if there are more"
