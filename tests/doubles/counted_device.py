"""A device that is none: tensors of torch's kind for backends written in Python, whose numbers are in host memory all
the same. It refuses whatever would make the host wait for a device, and counts the copies from and to the host.

What a real device refuses is refused: operands of which some are on the host, `item`, `tolist`, `numpy`, and operations
whose result has a shape that depends on numbers. Kernels are of another kind: they get the numbers themselves.
"""

import importlib
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch.utils import _pytree as tree

from cairn.kernels.batch import Batch, MultimodalEmbeddings
from cairn.kernels.operations import OPERATIONS

__all__ = ["SHAPED_BY_NUMBERS", "Copies", "HostRead", "counted_device", "counted_kernels", "on_numbers"]

_NAME = "counted"
_LIBRARY = torch.library.Library("_", "IMPL")
"""What is registered with it is there as long as it is."""

SHAPED_BY_NUMBERS = (
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.unique_dim.default,
    torch.ops.aten.repeat_interleave.Tensor,
    torch.ops.aten.bincount.default,
)
_READ = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)


class HostRead(AssertionError):
    """The host has asked for a number that is on the device."""


class Copies:
    """Copies between host and device so far, `ins` and `outs`, and the bytes of each."""

    def __init__(self) -> None:
        self.ins: list[int] = []
        self.outs: list[int] = []

    def take(self) -> tuple[int, int]:
        """Number of copies in and out since the last call."""
        found = len(self.ins), len(self.outs)
        self.ins, self.outs = [], []
        return found


class _Tensor(torch.Tensor):
    """`numbers`: a tensor of the host that has the same shape and strides."""

    numbers: torch.Tensor
    copies = Copies()
    __torch_function__ = torch._C._disabled_torch_function_impl  # or what is on the host becomes one of these

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> "_Tensor":
        with torch.inference_mode(False):  # or it could not be a view of one that was made before
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                numbers.shape,
                strides=numbers.stride(),
                storage_offset=numbers.storage_offset(),
                dtype=numbers.dtype,
                device=_device(),
            )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func not in _READ and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose(*args, **kwargs)  # in inference mode they come whole
    if func in _READ:
        raise HostRead(f"{func}: the host waits for a number")
    if func in SHAPED_BY_NUMBERS:
        raise HostRead(f"{func}: the host waits for a shape")
    if func is torch.ops.aten._to_copy.default:
        return _to_copy(args[0], kwargs)
    if func is torch.ops.aten.copy_.default:
        return _copy(*args)
    own = [each for each in tree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    strange = [each for each in own if not isinstance(each, _Tensor) and each.dim()]
    if strange and any(isinstance(each, _Tensor) for each in own):
        raise HostRead(f"{func}: operands are on the host, of shapes {[tuple(each.shape) for each in strange]}")
    if func is torch.ops.aten.index.Tensor or func is torch.ops.aten.index_put_.default:
        if any(each is not None and each.dtype == torch.bool for each in args[1]):
            raise HostRead(f"{func}: the host waits to know how many are chosen")
    wrapped: dict[int, _Tensor] = {id(each.numbers): each for each in own if isinstance(each, _Tensor)}
    args, kwargs = _bare((args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
    result = func(*args, **kwargs)

    def wrap(numbers: torch.Tensor) -> _Tensor:
        # an operation in place gives its operand back
        return wrapped[id(numbers)] if id(numbers) in wrapped else _Tensor(numbers)

    return tree.tree_map_only(torch.Tensor, wrap, result)


def _to_copy(source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    there = torch.device(kwargs.get("device") or source.device).type
    bare = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
    moved = torch.ops.aten._to_copy.default(_bare(source), **bare)
    _count(source.device.type, there, moved)
    return _Tensor(moved) if there == _NAME else moved


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if source.dim() or isinstance(source, _Tensor):
        _count(source.device.type, target.device.type, source)
    _bare(target).copy_(_bare(source))
    return target


def _count(source: str, target: str, moved: torch.Tensor) -> None:
    if source != target:
        (_Tensor.copies.ins if target == _NAME else _Tensor.copies.outs).append(moved.nbytes)


def _bare(values: Any) -> Any:
    return tree.tree_map_only(_Tensor, lambda each: each.numbers, values)


@cache
def _device() -> torch.device:
    """Made once: a process can have one such kind of device."""
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(_NAME)
    _LIBRARY.fallback(_run_new, "PrivateUse1")
    return torch.device(_NAME)


def _run_new(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What is made on the device without an operand that is there."""
    return _run(func, args, kwargs)


def counted_device() -> tuple[torch.device, Copies]:
    """The device, and what has been copied."""
    return _device(), _Tensor.copies


def counted_kernels(backend: str) -> str:
    """A backend whose functions are those of `backend`, for models on the device; what it is called by. What `pack`
    makes of a weight stays as it is."""
    name = f"{_NAME}_{backend}"
    kernels = importlib.import_module(f"cairn.kernels.{backend}")
    made = ModuleType(f"cairn.kernels.{name}")
    for each in OPERATIONS:
        setattr(made, each, on_numbers(getattr(kernels, each)))
    sys.modules[made.__name__] = made
    return name


def on_numbers(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gets the numbers of what is on the device, and whose results are there."""

    def called(*args: Any, **kwargs: Any) -> Any:
        found = kernel(*(_opened(each) for each in args), **{key: _opened(each) for key, each in kwargs.items()})
        return tree.tree_map_only(torch.Tensor, _Tensor, found)

    return called


def _opened(value: Any) -> Any:
    if isinstance(value, Batch):
        opened = {field.name: _opened(getattr(value, field.name)) for field in msgspec.structs.fields(value)}
        return msgspec.structs.replace(value, **opened)
    if isinstance(value, MultimodalEmbeddings):
        return MultimodalEmbeddings(_opened(value.rows), _opened(value.values))
    return _bare(value)
