"""Every variant of every kernel that models of usual sizes ask for compiles, without a GPU, for the three generations
that the backend takes, and fits their shared memory. What the interpreter cannot see: types, layouts, sizes."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from cairn.kernels.cuda.device import Limits  # noqa: E402
from cairn.kernels.cuda_support import MIN_CAPABILITY  # noqa: E402
from kernels.cuda_configurations import CONFIGURATIONS, configurations, module_of  # noqa: E402
from kernels.wgmma_descriptors import disassembled, num_products, wrong_descriptors  # noqa: E402
from tiers import long  # noqa: E402

GPUS: Mapping[int, Limits] = {
    80: Limits(108, 166_912, has_fp8=False),
    90: Limits(132, 232_448),
    100: Limits(148, 232_448),
    89: Limits(142, 101_376),
}
"""By compute capability: an A100's, an H100's, a B200's and an L40S's multiprocessors and shared memory."""

TENSOR_CORES = ("attention", "exact_products", "experts", "fp8", "gdn", "ssd")
"""Modules that are compiled for all of them: tensor cores are others in each, and so is what has to lie in shared
memory. The others' kernels are loads, stores and sums, and are compiled for one of them."""

WITHOUT_PRODUCTS = ("_combine_kernel", "_expand_kernel", "_sum_kernel")
"""Kernels of those modules that are like the others'."""

EVERYTHING = 90
"""The capability for which all is compiled; for the other ones pages are of 64 tokens only."""

COUNTS = ("EXPERTS", "GROUP", "H", "KV_HEADS", "PER_GROUP", "SCALE")
"""Constants that are one number or another in the same code."""

SWITCHES = ("CHUNK", "SOFTCAP", "WINDOW")
"""Those that are there or 0."""

ENDS = ("BLOCKED", "CLAMPED", "GATED", "GELU")
"""What is done behind a product: the same for every generation."""

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

SMALLEST = 89
"""The least shared memory of all that the backend takes; 8.6 and 12.0 have as much."""


@dataclass(frozen=True)
class Variant:
    """A kernel as it is asked for: types of arguments, values of constants, how many warps and the like."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]
    options: tuple[tuple[str, int], ...]

    @property
    def model(self) -> str:
        """The type of a model's numbers."""
        types = dict(self.signature)
        return types.get("x") or types.get("q") or ""

    @property
    def is_for_one_capability(self) -> bool:
        """Whether others say the same: other pages, other dtypes, other sizes."""
        constants = dict(self.constants)
        wide_fp8 = ("weight", "*u8") in self.signature and ("x", "*fp32") in self.signature
        form = constants.get("CODES")
        few_codes = form is not None and (form.numbers, form.scales, form.factors) != ("e2m1", "e4m3", "times")
        alike = few_codes or wide_fp8 or self.kernel.fn.__name__ in WITHOUT_PRODUCTS
        return alike or ("PAGE_SIZE", 16) in self.constants or constants.get("S", 64) in (16, 32)

    @property
    def is_large(self) -> bool:
        """Whether it would take more shared memory than the smallest GPUs have if it did not ask how much there is."""
        constants = dict(self.constants)
        if constants.get("PRECISION") == "bf16":
            wide = 128 if "PER_KEY" in constants else 256
            return "STAGES" in constants and constants["S"] == wide
        if constants.get("S") == 256:
            return True
        return (
            self.kernel.fn.__name__ == "_prefill_kernel"
            and constants.get("DIM") in (256, 512)
            and ("q", "*bf16") in self.signature
        )

    def outline(self, capability: int) -> tuple[object, ...]:
        """What its code depends on: variants of one outline are in tiles of one size, and take as much memory."""
        outline: dict[str, object] = {}
        for name, value in self.constants:
            if name in SWITCHES:
                outline[name] = bool(value)
            elif name == "CODES" and capability != EVERYTHING:
                form: Any = value
                outline[name] = form and (form.numbers, form.scales)
            elif name not in COUNTS and (name not in ENDS or capability == EVERYTHING):
                outline[name] = value
        return self.kernel.fn, self.signature, self.options, *sorted(outline.items())

    def is_rare(self, capability: int) -> bool:
        """A model in float32, where another capability or other pages say what there is to know."""
        pages_of_16 = ("PAGE_SIZE", 16) in self.constants
        return self.model == "*fp32" and (capability in (80, 100) or (capability == EVERYTHING and pages_of_16))

    @property
    def sort_key(self) -> str:
        return f"{self.kernel.fn.__name__} {self.signature} {self.constants} {self.options}"

    @property
    def is_exact(self) -> bool:
        """Whether it is one that `cuda_exact` launches in a layer. The sampler's sums are of whole numbers, whose order
        does not matter."""
        if self.kernel.fn.__module__.rpartition(".")[2] in ("sample", "processors", "logprobs"):
            return False
        return "*bf16" not in dict(self.signature).values() and ("PRECISION", "tf32x3") not in self.constants

    def compiled(self, capability: int) -> Any:
        """As it is launched by a layer: memory and strides are multiples of 16 where a launch may know it."""
        types, constants, names = dict(self.signature), dict(self.constants), self.kernel.arg_names
        assert set(types) | set(constants) == set(names) and not set(types) & set(constants)
        aligned = [
            (index,)
            for index, parameter in enumerate(self.kernel.params)
            if parameter.name in types and not parameter.do_not_specialize and _is_aligned(parameter.name, types)
        ]
        source = ASTSource(
            self.kernel,
            signature={name: types.get(name, "constexpr") for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={place: [["tt.divisibility", 16]] for place in aligned},
        )
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(self.options))


def _is_aligned(name: str, types: Mapping[str, str]) -> bool:
    by_16 = ("_stride", "_row", "_head", "_page", "_token", "split_length", "width", "channels")
    return types[name].startswith("*") or name.endswith(by_16)


def variants(name: str, gpu: Limits) -> list[Variant]:
    """A module's on a GPU, each once, in an order that does not depend on the process."""
    module = module_of(name)
    with pytest.MonkeyPatch.context() as patch:
        for each in (module, module_of("fp8"), module_of("attention_tiles")):
            if hasattr(each, "limits"):
                patch.setattr(each, "limits", lambda: gpu)
        found = {
            Variant(kernel, *(tuple(sorted(part.items())) for part in parts)) for kernel, *parts in configurations(name)
        }
    return sorted(found, key=lambda each: each.sort_key)


def every_variant() -> Iterator[Any]:
    """The first of each outline, all others for the long run."""
    outlines = set()
    for capability, gpu in GPUS.items():
        for name in CONFIGURATIONS if capability == EVERYTHING else TENSOR_CORES:
            for number, variant in enumerate(variants(name, gpu)):
                if capability == SMALLEST and not variant.is_large:
                    continue
                if capability == EVERYTHING or not variant.is_for_one_capability:
                    label = f"{capability}-{name}{variant.kernel.fn.__name__}-{number}"
                    outline = capability, variant.outline(capability)
                    is_long = outline in outlines or variant.is_rare(capability)
                    outlines.add(outline)
                    yield pytest.param(capability, variant, id=label, marks=pytest.mark.long if is_long else ())


def with_oldest_ptxas(ptx: str, folder: Path) -> bytes:
    """Machine code for Hopper as it is made where Triton's own ptxas is that of CUDA 12.8 and there is no newer one."""
    source, cubin = folder / "kernel.ptx", folder / "oldest.cubin"
    source.write_text(re.sub(r"^\.version \S+", ".version 8.7", ptx, count=1, flags=re.MULTILINE))
    command = [str(TOOLS / "ptxas"), "--gpu-name=sm_90a", str(source), "-o", str(cubin)]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    return cubin.read_bytes()


@pytest.mark.parametrize(("capability", "variant"), list(every_variant()))
def test_a_variant_compiles_and_fits(capability: int, variant: Variant, tmp_path: Path) -> None:
    compiled = variant.compiled(capability)
    ptx = compiled.asm["ptx"]
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= GPUS[capability].shared_memory
    # Neither tensor cores nor sums in the order of whoever comes first.
    assert not variant.is_exact or not re.search(r"mma|tcgen05|tf32|\batom\.|\bred\.", ptx)
    if "wgmma.mma_async" in ptx:
        sass = disassembled(with_oldest_ptxas(ptx, tmp_path), str(TOOLS / "nvdisasm"), tmp_path)
        assert num_products(sass) > 0 and wrong_descriptors(sass) == []


@pytest.mark.parametrize("capability", GPUS)
def test_copies_of_states_and_pages_move_16_bytes_a_thread(capability: int) -> None:
    """Where all begins at multiples of 16 bytes, which a lost hint would halve, and no result would show."""
    for variant in variants("checkpoint_files", GPUS[capability]):
        if ("ALIGNED", True) in variant.constants:
            ptx = variant.compiled(capability).asm["ptx"]
            for instruction in ("ld", "st"):
                assert re.search(rf"\b{instruction}\.global[.\w]*\.v2\.b64", ptx), variant.sort_key


ARITHMETIC = re.compile(r"\b(?:FADD|FFMA|MUFU|SHFL)(?:\.\w+)*")
"""Without FMUL: a product that is fused with a sum is one sum less, and one that is not kept but computed again, where
registers are few, has the same bits."""


def arithmetic_of(variant: Variant, capability: int, folder: Path) -> Counter[str]:
    """How often machine code adds and so on numbers that are no addresses, and exchanges them."""
    sass = disassembled(variant.compiled(capability).asm["cubin"], str(TOOLS / "nvdisasm"), folder)
    return Counter(match.group() for match in ARITHMETIC.finditer(sass))


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        (80, "conv"),
        (90, "conv"),
        (90, "gdn_decode"),
        (90, "ssd_decode"),
        long(80, "gdn_decode"),
        long(80, "ssd_decode"),
    ],
)
def test_verifies_have_the_arithmetic_of_decodes(capability: int, name: str, tmp_path: Path) -> None:
    """`cuda` has a kernel of its own for decodes alone. Which products and sums are fused is the compilers' choice, and
    would change their bits; on these GPUs they make the same."""
    found = {
        kernel: {
            (each.constants, each.model, dict(each.signature)["states"]): arithmetic_of(each, capability, tmp_path)
            for each in variants(name, GPUS[capability])
            if each.kernel.fn.__name__ == kernel
        }
        for kernel in ("_decode_kernel", "_tokens_kernel")
    }
    assert found["_decode_kernel"] == found["_tokens_kernel"]
    assert all(counts["FFMA"] > 4 for counts in found["_decode_kernel"].values())


def test_codes_are_rounded_after_each_operation() -> None:
    """A product and a sum that the compiler makes at once would give a weight with a minimum other bits, and numbers
    that are too small for an exponent are none that may be 0."""
    found = [each for each in variants("fp8", GPUS[90]) if dict(each.constants)["CODES"] is not None]
    assert len(found) > 30
    for variant in found:
        form, ptx = dict(variant.constants)["CODES"], variant.compiled(90).asm["ptx"]
        assert "mul.f32" in ptx or "mul.rn.f32" in ptx or "mul.f32x2" in ptx
        assert not re.search(r"\.ftz\b", ptx) and ("div.rn.f32" in ptx) is (form.factors == "over")
        if form.has_minimums and dict(variant.signature)["out"] == "*bf16":
            assert not re.search(r"\bfma\.", ptx), variant.sort_key


def test_every_kernel_has_variants() -> None:
    """A kernel that is launched but not named by `cuda_configurations` would be compiled nowhere."""
    for name in CONFIGURATIONS:
        module = module_of(name)
        kernels = {key for key, value in vars(module).items() if key.endswith("_kernel") and hasattr(value, "params")}
        assert kernels == {each.kernel.fn.__name__ for each in variants(name, GPUS[90])}


def test_the_least_capability_is_among_them() -> None:
    assert divmod(min(GPUS), 10) == MIN_CAPABILITY
