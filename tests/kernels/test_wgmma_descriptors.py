"""What is said of descriptors in machine code, on lines that ptxas 12.8 has made on the way to an H100."""

import pytest

from kernels.wgmma_descriptors import num_products, wrong_descriptors

RIGHT = """
/*0a80*/ UMOV UR4, URZ ;
/*0a90*/ UIADD3 UR12, UP0, UR8, 0x2, URZ ;
/*0ac0*/ UIADD3.X UR13, UR4, 0x40000040, URZ, UP0, !UPT ;
/*0b00*/ UMOV UR5, URZ ;
/*0b20*/ UIADD3.X UR5, UR5, 0x40000040, URZ, UP0, !UPT ;
/*0b30*/ UMOV UR7, UR13 ;
/*0b40*/ UIADD3.64 UR10, UR12, 0x2, URZ ;
"""

WRONG = """
/*21d0*/ UIADD3 UR4, UP0, UR9, 0x20, URZ ;
/*2220*/ UIADD3.X UR5, UR9, -0x3ffffff0, URZ, UP0, !UPT ;
/*2240*/ UMOV UR14, UR4 ;
/*2270*/ UMOV UR15, UR5 ;
"""


@pytest.mark.parametrize(
    "operands",
    [
        "R32, R60, gdesc[UR4].tnspB, R32, gsb0",  # one descriptor, in UR6 and UR7
        "R32, R60, gdesc[UR8], R32",  # what is 2 further on
        "R32, gdesc[UR12], R32",  # two of them; nothing is known of UR15
    ],
)
def test_a_layout_above_an_address_is_right(operands: str) -> None:
    sass = f"{RIGHT}/*2290*/ HGMMA.64x16x16.F32.BF16 {operands} ;\n"
    assert num_products(sass) == 1 and wrong_descriptors(sass) == []


@pytest.mark.parametrize("operands", ["R32, R60, gdesc[UR12].tnspB, R32, gsb0", "R32, gdesc[UR12], RZ, !UPT"])
def test_a_layout_added_to_an_address_is_wrong(operands: str) -> None:
    sass = f"{RIGHT}{WRONG}/*2290*/ HGMMA.64x16x16.F32.BF16 {operands} ;\n"
    assert wrong_descriptors(sass) == [f"HGMMA.64x16x16.F32.BF16 {operands} "]


def test_what_was_zero_when_it_was_added_is_not_wrong_for_what_came_later() -> None:
    sass = f"{RIGHT}/*2280*/ LDC R4, c[0x0][0x248] ;\n/*2290*/ HGMMA.64x8x16.F32.BF16 R8, R60, gdesc[UR4], R8 ;\n"
    assert wrong_descriptors(sass) == []


def test_zero_comes_in_pairs() -> None:
    """Of two registers that are cleared at once the upper one takes the layout."""
    sass = (
        "/*2140*/ CS2R R4, SRZ ;\n/*2270*/ IADD3.X R5, R5, 0x40000040, RZ, P0, !PT ;\n/*2280*/ R2UR UR7, R5 ;\n"
        "/*2290*/ HGMMA.64x8x16.F32.BF16 R8, R60, gdesc[UR4], R8 ;\n"
    )
    assert wrong_descriptors(sass) == []
    assert len(wrong_descriptors(sass.replace("CS2R R4, SRZ", "CS2R R4, SR_CLOCKLO"))) == 1
