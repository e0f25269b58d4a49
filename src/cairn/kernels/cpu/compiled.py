"""Loops over memory, compiled by numba for this machine and run by torch's threads.

    @kernel({torch.float32: (F32, F32, INT, FLOAT), torch.bfloat16: (BF16, BF16, INT, FLOAT)})
    def _scale(begin: int, end: int, x: Any, out: Any, width: int, factor: float) -> None: ...

    _scale[x.dtype](rows, cost, x.data_ptr(), out.data_ptr(), width, factor)

A kernel does items [begin, end) of some count, each a result of its own: how the range is cut must not show.
Operands come as addresses; `scalars.load(x, i)` is float32 for float32, bfloat16 and float16 alike, and
`scalars.store(x, i, value)` rounds to nearest even. An argument whose type is a `record` is a named tuple in the
kernel's body, for which a call has the fields one after the other.

Not `parallel=True`, which brings a second team of threads that fights with torch's for the cores, and not
`fastmath=True`, which promises that there is no NaN and no infinity: recycled pages and masks have both.
"""

import ctypes
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import llvmlite.binding
import numba
import numba.extending
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.ccallback import CFunc

from cairn.kernels.cpu.compile_cache import CompileCache, cache_folder, lock_path
from cairn.kernels.cpu.features import features_text
from cairn.kernels.cpu.inlined import InlinedFunction
from cairn.kernels.cpu.recording import Loop, recording
from cairn.kernels.cpu.threads import inline_limit, step_work, team

Function = TypeVar("Function", bound=Callable[..., Any])

INT = types.int64
FLOAT = types.float32
F32 = types.CPointer(types.float32)
BF16 = types.CPointer(types.uint16)
F16 = types.CPointer(types.int16)
I8 = types.CPointer(types.int8)
U8 = types.CPointer(types.uint8)
I16 = types.CPointer(types.int16)
I32 = types.CPointer(types.int32)
I64 = types.CPointer(types.int64)

ELEMENTS: Mapping[torch.dtype, types.Type] = {torch.float32: F32, torch.bfloat16: BF16}
"""What a tensor of a model's dtype is to compiled code."""

STATE_ELEMENTS: Mapping[torch.dtype, types.Type] = {**ELEMENTS, torch.float16: F16}
"""What a tensor of recurrent states is."""


class StateKey(NamedTuple):
    """The key of a variant for models of a dtype, None for all, whose recurrent states are in a dtype."""

    model: torch.dtype | None
    state: torch.dtype


FAST = frozenset(("reassoc", "contract", "arcp", "nsz"))
"""Sums in any order, a * b + c rounded once, 1 / x for a quotient, either sign of zero."""

# Nobody calls a kernel's functions from Python.
_OPTIONS: Mapping[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

_MOST_SECONDS = 300.0
"""That a process waits for another one to compile a variant, before it does so itself."""

SHARE = 2
"""A thread takes, of what is left, its share divided by this: large ranges first, in which it reads memory in order,
and small ones at last, so that threads end together. One that is held up leaves most of its share to the others."""

_NATIVE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)


# Without a limit these are the same as what numba finds by itself.
numba.config.CPU_FEATURES = features_text()
# For instructions that are written out.
llvmlite.binding.initialize_native_asmparser()


def jit(function: Function) -> Function:
    """A function that kernels call; LLVM inlines it where that pays."""
    return cast(Function, InlinedFunction(function, {**_OPTIONS, "fastmath": set(FAST)}))


def exact_jit(function: Function) -> Function:
    """`jit` whose sums stay in the order they are written in."""
    return cast(Function, InlinedFunction(function, {**_OPTIONS, "fastmath": {"contract"}}))


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function that gives its own LLVM code: see `numba.extending.intrinsic`."""
    return numba.extending.intrinsic(function)


def record(fields: type[tuple[Any, ...]], *kinds: types.Type) -> types.NamedTuple:
    """The type of a named tuple whose fields are of these kinds."""
    return types.NamedTuple(kinds, fields)


def row_args(x: torch.Tensor) -> tuple[int, int]:
    """Two arguments of a kernel: the address of x and how many numbers its rows are apart."""
    return x.data_ptr(), x.stride(0)


def optional_arg(x: torch.Tensor | None) -> tuple[int, bool]:
    """Two arguments of a kernel: an address, and whether there is such a tensor."""
    return (0, False) if x is None else (x.data_ptr(), True)


def kernel(
    variants: Mapping[Hashable, tuple[types.Type, ...]], needs: bool = True
) -> Callable[[Callable[..., None]], "Kernel"]:
    """A kernel of the function below: for each key the types of its arguments after `begin` and `end`. `needs`:
    whether this processor has the instructions in its body; without them it has no variants, since LLVM ends the
    process where it is given an instruction that the processor has not."""
    return lambda function: Kernel(function, variants if needs else {})


class Variant:
    """A kernel compiled for one list of argument types. `address`: of a C function of the address of what `__call__`
    packs, which returns whether it failed."""

    def __init__(
        self, function: Callable[..., None], argument_types: tuple[types.Type, ...], compiled: CFunc | None = None
    ) -> None:
        """`compiled`: by `_compile`; None: it waits for what another process compiles meanwhile."""
        self.name = function.__name__
        codes = "".join("f" if kind == FLOAT else "q" for kind in _fields(argument_types))
        self._pack = struct.Struct("@qqq" + codes).pack
        self._compiled = compiled or _compile(function, argument_types)
        self.address = int(self._compiled.address)
        self._native = _NATIVE(self.address)
        self._team, self._inline_limit, self._work = team(), inline_limit(), step_work()

    @property
    def from_cache(self) -> bool:
        """Whether an earlier process had compiled it."""
        return bool(self._compiled.cache_hits)

    def __call__(self, count: int, cost: int, *arguments: float) -> None:
        """All `count` items, with addresses and numbers as the kernel wants them. `cost`: what all of them take on one
        thread, in nanoseconds, roughly: little work stays on the calling thread."""
        alone = cost < self._inline_limit or count < 2 or not self._team
        threads = 1 if alone else self._work.threads_for(cost)
        packed = self._pack(self._team, threads, count, *arguments)
        if self._native(packed):
            raise RuntimeError(f"{self.name} failed on {count} items")
        record = recording()
        if record is not None:
            record.add_loop(self, packed)

    def later(self, count: int, *arguments: float) -> Loop:
        """What `__call__` does, on the one thread that will run it: see `LoopSequence`."""
        return self, self._pack(self._team, 1, count, *arguments)


class Kernel(dict[Hashable, Variant]):
    """The variants of a kernel, each compiled when it is first asked for. `path`: its module and name.
    `argument_types`: of each key. `size`: of its code, by which one that takes long to compile can be told."""

    def __init__(
        self, function: Callable[..., None], argument_types: Mapping[Hashable, tuple[types.Type, ...]]
    ) -> None:
        super().__init__()
        self.name = function.__name__
        self.path = f"{function.__module__}:{self.name}"
        self.argument_types = argument_types
        self.size = len(function.__code__.co_code)
        self._function = function

    def __missing__(self, key: Hashable) -> Variant:
        if key not in self.argument_types:
            raise TypeError(f"{self.name} takes {list(self.argument_types)}, not {key}")
        variant = self[key] = Variant(self._function, self.argument_types[key])
        return variant

    def keys_for(self, dtype: torch.dtype | None = None, state_dtype: torch.dtype | None = None) -> Sequence[Hashable]:
        """Of the variants for a dtype and for a dtype of recurrent states, or for any. A key is for the dtype that it
        is or begins with; a kernel with a single variant is for every dtype."""
        is_any = dtype is None or len(self.argument_types) == 1

        def fits(key: Hashable) -> bool:
            if isinstance(key, StateKey):
                return state_dtype in (None, key.state) and (is_any or key.model in (None, dtype))
            return is_any or (key[0] if isinstance(key, tuple) else key) == dtype

        return [key for key in self.argument_types if fits(key)]

    def compile_if_free(self, key: Hashable) -> bool:
        """Whether the variant is ready now: not if another process is compiling it."""
        if key not in self:
            compiled = _compile_within(0, self._function, self.argument_types[key])
            if compiled is not None:
                self[key] = Variant(self._function, self.argument_types[key], compiled)
        return key in self

    def was_begun(self, key: Hashable) -> bool:
        """Whether a process has compiled the variant for later ones, or is compiling it."""
        folder = cache_folder()
        return folder is not None and lock_path(self._function, self.argument_types[key], folder).exists()


def _fields(argument_types: Iterable[types.Type]) -> Iterator[types.Type]:
    """The types with each record's fields in its place."""
    for kind in argument_types:
        yield from kind.types if isinstance(kind, types.NamedTuple) else (kind,)


def _compile(function: Callable[..., None], argument_types: tuple[types.Type, ...]) -> CFunc:
    """See `_declare`; compiled, or loaded once another process has compiled it."""
    compiled = _compile_within(_MOST_SECONDS, function, argument_types)
    if compiled is None:
        compiled = _declare(function, argument_types)
        compiled.compile()
    return compiled


def _compile_within(
    seconds: float, function: Callable[..., None], argument_types: tuple[types.Type, ...]
) -> CFunc | None:
    """None where another process was still compiling it after so many seconds."""
    folder, compiled = cache_folder(), _declare(function, argument_types)
    if folder is None:
        compiled.compile()
        return compiled
    cache = CompileCache(function, argument_types, folder)
    with cache.claimed(seconds) as free:
        if not free:
            return None
        compiled._cache = cache
        compiled.compile()
    return compiled


def _declare(function: Callable[..., None], argument_types: tuple[types.Type, ...]) -> CFunc:
    """C function of the address of team, threads, count and the arguments, that runs `function` on the team; nothing
    is compiled yet."""
    split = _split_over_team(jit(function), argument_types)

    def entry(packed: int) -> int:
        failed: int = split(packed)
        return failed

    entry.__qualname__ = entry.__name__ = function.__name__
    signature = (types.voidptr,), types.int64
    return CFunc(entry, signature, {}, {"nopython": True, "error_model": "numpy"})


def _split_over_team(work: Any, argument_types: tuple[types.Type, ...]) -> Any:
    """`split(packed)` for compiled code: every thread takes ranges until none is left, each a part of what is left
    then (Polychronopoulos and Kuck, "Guided Self-Scheduling", 1987)."""
    i64, pointer = ir.IntType(64), ir.IntType(8).as_pointer()
    wanted = (types.int64, types.int64, *argument_types)
    # next item, count, how many parts what is left has, arguments, whether a range failed
    shared_type = ir.LiteralStructType([i64, i64, i64, pointer, i64])

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (packed,) = args
        team, threads, count, *_ = _unpack(context, builder, packed)
        zero = ir.Constant(i64, 0)
        single = ir.Constant(i64, 1)
        alone = builder.icmp_signed("<=", threads, single)
        parts = builder.select(alone, single, builder.mul(threads, ir.Constant(i64, SHARE)))
        shared = cgutils.alloca_once(builder, shared_type)
        for index, value in enumerate((zero, count, parts, packed, zero)):
            builder.store(value, cgutils.gep_inbounds(builder, shared, 0, index))
        body = _thread_function(context, builder.module)
        data = builder.bitcast(shared, pointer)
        with builder.if_else(alone) as (then, otherwise):
            with then:
                builder.call(body, [data])
            with otherwise:
                i32 = ir.IntType(32)
                parallel = ir.FunctionType(ir.VoidType(), [body.type, pointer, i32, i32]).as_pointer()
                number = builder.trunc(threads, i32)
                builder.call(builder.inttoptr(team, parallel), [body, data, number, ir.Constant(i32, 0)])
        return builder.load(cgutils.gep_inbounds(builder, shared, 0, 4))

    def _thread_function(context: Any, module: Any) -> Any:
        """void (shared *): what each thread runs."""
        body = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer]), f"{work.__name__}.on_thread")
        body.linkage = "internal"
        builder = ir.IRBuilder(body.append_basic_block("entry"))
        shared = builder.bitcast(body.args[0], shared_type.as_pointer())
        at = [cgutils.gep_inbounds(builder, shared, 0, index) for index in range(5)]
        count, parts = builder.load(at[1]), builder.load(at[2])
        _, _, _, *arguments = _unpack(context, builder, builder.load(at[3]))
        entry = builder.block
        again, take, run, done = (body.append_basic_block(name) for name in ("again", "take", "run", "done"))
        first = builder.load_atomic(at[0], "monotonic", 8)
        builder.branch(again)
        builder.position_at_end(again)
        begin = builder.phi(i64)
        begin.add_incoming(first, entry)
        left = builder.sub(count, begin)
        builder.cbranch(builder.icmp_signed(">", left, ir.Constant(i64, 0)), take, done)
        builder.position_at_end(take)
        end = builder.add(begin, builder.udiv(builder.add(left, builder.sub(parts, ir.Constant(i64, 1))), parts))
        taken = builder.cmpxchg(at[0], begin, end, "monotonic", "monotonic")
        begin.add_incoming(builder.extract_value(taken, 0), take)
        builder.cbranch(builder.extract_value(taken, 1), run, again)
        builder.position_at_end(run)
        failed = builder.zext(_call(context, builder, [begin, end, *arguments]), i64)
        builder.atomic_rmw("or", at[4], failed, "monotonic")
        begin.add_incoming(builder.load_atomic(at[0], "monotonic", 8), builder.block)
        builder.branch(again)
        builder.position_at_end(done)
        builder.ret_void()
        return body

    def _unpack(context: Any, builder: Any, packed: Any) -> list[Any]:
        kinds = (types.int64,) * 3 + tuple(_fields(argument_types))
        fields = [ir.FloatType() if kind == FLOAT else i64 for kind in kinds]
        record = builder.bitcast(packed, ir.LiteralStructType(fields).as_pointer())
        values = [builder.load(cgutils.gep_inbounds(builder, record, 0, index)) for index in range(len(fields))]
        return [
            builder.inttoptr(value, context.get_value_type(kind)) if isinstance(kind, types.CPointer) else value
            for value, kind in zip(values, kinds, strict=True)
        ]

    def _call(context: Any, builder: Any, values: list[Any]) -> Any:
        """Calls `work` and gives back whether it failed."""
        fields = iter(values)
        arguments = [
            context.make_tuple(builder, kind, [next(fields) for _ in kind])
            if isinstance(kind, types.NamedTuple)
            else next(fields)
            for kind in wanted
        ]
        compiled = work.get_compile_result(types.void(*wanted))
        context.active_code_library.add_linking_library(compiled.library)
        function = context.declare_function(builder.module, compiled.fndesc)
        status, _ = context.call_conv.call_function(builder, function, types.void, wanted, arguments)
        return status.is_error

    @intrinsic
    def split(typingctx: Any, packed: Any) -> Any:
        return types.int64(types.voidptr), code

    return split
