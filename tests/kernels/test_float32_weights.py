"""Weights of bfloat16 models on processors that have neither bfloat16 products nor AVX2 and FMA to make them of: kept
in float32, in products alone."""

import logging

import pytest
import torch

from cairn.kernels import cpu
from cairn.kernels.cpu import products
from cairn.models.registry import open_model


@pytest.fixture
def without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has neither AVX512 nor AVX2 nor a unit for bfloat16."""
    monkeypatch.setattr(products, "has_products", lambda dtype: dtype != torch.bfloat16)
    monkeypatch.setattr(products, "has_panels", lambda dtype: False)
    products._layout_for.cache_clear()
    yield
    products._layout_for.cache_clear()


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_products_are_rounded_once(without_products: None, rows: int, dtype: torch.dtype | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in ((rows, 300), (70, 300), (70,)))
    packed = cpu.pack(weight)
    assert packed.dtype == torch.bfloat16 and packed.matrices[0].dtype == torch.float32
    found, truth = products.multiply(x, packed, bias, dtype=dtype), x.double() @ weight.double().t() + bias.double()
    assert found.dtype == (dtype or torch.bfloat16) and found.shape == (rows, 70)
    rounding = torch.finfo(found.dtype).eps / 2
    torch.testing.assert_close(found.double(), truth, rtol=1.01 * rounding, atol=2e-4)


def test_float32_weights_are_not_copied(without_products: None) -> None:
    weight = torch.randn(8, 8)
    assert cpu.pack(weight).matrices[0].data_ptr() == weight.data_ptr()
    assert cpu.packed_dtype(torch.float32) == torch.float32


def test_it_is_said_once(without_products: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            cpu.pack(torch.zeros(4, 4).bfloat16())
    assert [record.message for record in caplog.records] == [
        "weights of products are kept in float32: this processor has no products in torch.bfloat16"
    ]


def test_memory_is_counted_as_it_will_be_taken(without_products: None, made_model) -> None:
    opened = open_model(made_model("qwen3_5"), "bfloat16")
    stored = opened.stored_tensors()
    plain, counted = opened.weight_bytes(stored), opened.weight_bytes(stored, 1, cpu.packed_dtype)
    model = opened.build(exact=False)
    wider = sum(matrix.nbytes // 2 for linear in model.linears for matrix in linear.weight.matrices)
    assert counted - plain == wider > 0
    assert model.embedding.weight.dtype == torch.bfloat16
