"""What is staged, sent at once."""

from collections.abc import Callable
from typing import TypeVar

import torch

from cairn.kernels.staging import Staging

Made = TypeVar("Made")


def staged(make: Callable[[Staging], Made], device: torch.device | None = None) -> Made:
    """What `make` gives when what it has staged is on the device."""
    staging = Staging()
    made = make(staging)
    staging.send(device or torch.device("cpu"))
    return made
