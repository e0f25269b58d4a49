"""Does this machine's BLAS give a row the same bits wherever it stands in a product of fixed shape?

Exact mode rests on it, and it is a property of the library, the processor and the number of threads.
"""

from collections.abc import Iterable

import torch

from cairn.errors import ConfigError
from cairn.kernels.exact.products import find_dependent_height
from cairn.layers.linear import Linear


def check_row_independence(linears: Iterable[Linear], seed: int = 0) -> int:
    """Runs every weight shape of a model on the `exact` backend; returns how many there were.

    Raises ConfigError that names the shape whose rows depend on their place or on their neighbours.
    """
    by_shape = {(linear.shape, linear.bias is None): linear for linear in linears}
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for linear in by_shape.values():
            height = find_dependent_height(linear.weight, linear.bias, generator)
            if height is not None:
                raise ConfigError(
                    f"--exact: products with a weight of shape {list(linear.shape)} in tiles of {height} rows give "
                    f"other bits at another place in the batch on this machine with {torch.get_num_threads()} threads; "
                    "run without --exact, or with OMP_NUM_THREADS=1 if there are more"
                )
    return len(by_shape)
