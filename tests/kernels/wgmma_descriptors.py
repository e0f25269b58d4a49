"""Wrong shared memory descriptors in machine code for Hopper, of ptxas 12.8 (`cairn.kernels.cuda.assembler`).

A product of tensor cores (HGMMA) takes operands in shared memory by descriptors of 64 bits in pairs of uniform
registers: the lower half has the address, which is worked out, the upper half the layout, which is one of `LAYOUTS`
(PTX ISA, "Matrix descriptor format" of wgmma). Compilers work descriptors out by additions of 64 bits: to the address
zero-extended, whose upper half is zero, the layout is added. What is wrong adds the layout to a register that is not
zero, the lower half.
"""

import re
import subprocess
from pathlib import Path

LAYOUTS = frozenset((0x4000_0040, 0x8000_0020, 0xC000_0010))
"""Swizzles of 128, 64 and 32 bytes, each with the distance of its groups of 8 rows over 16."""

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<name>[A-Z][\w.]*)\s*(?P<operands>[^;]*);")
_REGISTER = re.compile(r"(U?R)(\d+)")
_MOVES = ("UMOV", "MOV", "R2UR", "IMAD.MOV.U32", "IMAD.U32")
_WRONG = -1


def disassembled(cubin: bytes, nvdisasm: str, folder: Path) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    return subprocess.run([nvdisasm, "-c", str(file)], capture_output=True, text=True, timeout=60, check=True).stdout


def num_products(sass: str) -> int:
    return sum("HGMMA" in line and "gdesc" in line for line in sass.splitlines())


def wrong_descriptors(sass: str) -> list[str]:
    """Products one of whose descriptors has its layout added to a register that is not known to be zero. Instructions
    are followed in the order in which they are written; a descriptor that was loaded from memory is not looked into."""
    values: dict[str, int] = {}
    """Of registers that are known, or `_WRONG`."""
    wrong = []
    for name, operands in (match.groups() for match in map(_INSTRUCTION.search, sass.splitlines()) if match):
        if name.startswith("HGMMA"):
            wrong += [f"{name} {operands}"] * any(values.get(each) == _WRONG for each in _upper_halves(operands))
            continue
        parts = [part.strip().removesuffix(".reuse") for part in operands.split(",")]
        # A predicate that has the carry comes before the register.
        target = next((part for part in parts[:2] if _REGISTER.fullmatch(part)), None)
        if target is None or name.startswith(("ST", "RED", "ATOM", "BAR")):
            continue
        sources = [part for part in parts[parts.index(target) + 1 :] if not re.fullmatch(r"!?U?PT?\d*", part)]
        known = [_value(values, source) for source in sources]
        upper = [_value(values, _upper(source)) for source in sources]
        wide = ".64" in name or ".WIDE" in name or name == "CS2R"
        for register in (target, _next(target)) if wide else (target,):
            values.pop(register, None)
        if name == "CS2R" and sources == ["SRZ"]:
            values[target] = values[_next(target)] = 0
        elif name == "UIADD3.64":
            _add(values, _next(target), upper)
        elif name.startswith(("UIADD3.X", "IADD3.X")):
            _add(values, target, known)
        elif name in _MOVES and known[-1] is not None:
            values[target] = known[-1]
    return wrong


def _upper_halves(operands: str) -> list[str]:
    """Of the two descriptors; of the second alone where the first operand is in registers."""
    match = re.search(r"gdesc\[UR(\d+)\]", operands)
    if match is None:
        return []
    first, in_registers = int(match[1]), not operands.split(",")[1].strip().startswith("gdesc")
    return [f"UR{first + 3}"] if in_registers else [f"UR{first + 1}", f"UR{first + 3}"]


def _add(values: dict[str, int], target: str, terms: list[int | None]) -> None:
    """An unknown term beside a layout is what is looked for."""
    known = [term for term in terms if term is not None]
    if _WRONG in known or (len(known) < len(terms) and any(term in LAYOUTS for term in known)):
        values[target] = _WRONG
    elif len(known) == len(terms):
        values[target] = sum(known) % (1 << 32)


def _value(values: dict[str, int], operand: str) -> int | None:
    sign, name = (-1 if operand.startswith("-") else 1), operand.lstrip("-")
    if name in ("RZ", "URZ"):
        return 0
    found = int(name, 16) if name.startswith("0x") else values.get(name)
    return found if found in (None, _WRONG) else sign * found % (1 << 32)


def _upper(operand: str) -> str:
    """The upper half of an operand of 64 bits; of a constant, which has at most 32, it is zero."""
    name = operand.lstrip("-")
    sign = operand[: len(operand) - len(name)]
    return sign + _next(name) if _REGISTER.fullmatch(name) else "RZ"


def _next(register: str) -> str:
    match = _REGISTER.fullmatch(register)
    assert match is not None
    return f"{match[1]}{int(match[2]) + 1}"
