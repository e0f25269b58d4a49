"""Functions that compiled code alone calls: no machine code of their own, and optimized once, inside what calls them.

numba compiles, optimizes and makes machine code of every function by itself, and then of its caller with all of it
inside. Kernels have some thirty small functions each, in several layers: two thirds of the time went there.
"""

from collections.abc import Mapping
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher
from numba.core.typing.templates import Signature


class _PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """A module that is linked into callers as it was written."""

    def _optimize_final_module(self) -> None:
        """Whoever links it optimizes it."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _PartCompiler(Compiler):  # type: ignore[misc]
    """numba's compiler, whose code goes into a `_PartLibrary`."""

    def __init__(self, typingctx: Any, targetctx: Any, library: Any, *others: Any) -> None:
        super().__init__(typingctx, targetctx, library, *others)
        codegen = targetctx.codegen()
        self.state.library = _PartLibrary(codegen, "part")


class InlinedFunction(CPUDispatcher):  # type: ignore[misc]
    """A function for compiled code, as numba makes one by njit; Python cannot call it."""

    def __init__(self, function: Any, options: Mapping[str, Any]) -> None:
        super().__init__(function, targetoptions={"nopython": True, **options}, pipeline_class=_PartCompiler)
        self._compiler._customize_flags = _without_machine_code

    def compile(self, sig: Any) -> Any:
        super().compile(sig)
        arguments = tuple(sig.args) if isinstance(sig, Signature) else tuple(sig)
        return self.overloads[arguments].entry_point

    def add_overload(self, result: Any) -> None:
        """Known to callers by a key that stands for the address that it has not."""
        result = result._replace(entry_point=object())
        self.targetctx.insert_user_function(result.entry_point, result.fndesc, [result.library])
        self.overloads[tuple(result.signature.args)] = result


def _without_machine_code(flags: Any) -> Any:
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
    return flags
