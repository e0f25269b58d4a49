"""Products in four bits of which one place is changed are found by the tests of them: in processes of their own, whose
kernels are compiled anew."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cairn.kernels.cpu.tiles import HAS_INT4

MUTANTS = {
    "nothing is changed": "",
    "the scale of the group before": """
pack = int4.pack_int4
int4.pack_int4 = lambda w: pack(replace(w, scales=w.scales.roll(1, -1)))
""",
    "no minimum": """
pack = int4.pack_int4
int4.pack_int4 = lambda w: pack(replace(w, minimums=torch.zeros_like(w.scales)))
""",
    "halves of a byte in the other order": """
nibbles = tiles._nibbles
def swapped(builder, words, part):
    return nibbles(builder, words, 1 - part)
tiles._FORMS = {key: replace(form, part_of=swapped) if form.in_groups else form for key, form in tiles._FORMS.items()}
""",
    "twice as many sums as 16 bits have room for": """
tiles._FORMS = {key: replace(form, run=2 * form.run) for key, form in tiles._FORMS.items()}
""",
    "the factors of the neighbour's row": """
number = tiles._Tile._number
tiles._Tile._number = lambda self, word, part, row, kind: number(
    self, word, part, (row + 1) % self.rows if kind == tiles._FLOAT else row, kind
)
""",
}

CHECK = """
import sys
from dataclasses import replace

import torch

from cairn.kernels import cpu
from cairn.kernels.cpu import int4, tiles

{change}
cpu.pack_int4 = int4.pack_int4
from kernels import test_int4 as tests

try:
    tests.test_products_are_the_references(torch.float32, 320, 7)
    tests.test_products_are_the_references(torch.float32, 320, 1)
    tests.test_sums_of_the_largest_numbers_are_exact()
except AssertionError:
    sys.exit(3)
"""


@pytest.mark.more
@pytest.mark.skipif(not HAS_INT4, reason="needs AVX2 and FMA, or VNNI")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_changed_product_is_found(name: str, tmp_path: Path) -> None:
    environ = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "XDG_CACHE_HOME": str(tmp_path),
        "CAIRN_MAX_CPU_ISA": "avx2",  # where sums of 16 bits are
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(change=MUTANTS[name])],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == (0 if name == "nothing is changed" else 3), done.stderr[-2000:]
