"""Products of few and many rows with weights that come from memory, beside what a core's memory and multipliers can do.

    python -m benchmarks.weight_products [--precisions bfloat16 int8 int4] [--rows 1 2 3 4 8 12 16 64 252]
                                         [--outputs 5632] [--inputs 1024] [--seconds 0.5] [--seed 0] [--json FILE]

So many weights of one size are taken in turn that no cache holds them. One thread, by its processor time, the lower
quartile of what --seconds have room for: others on the machine take nothing of it but memory's speed and the clock's.
Memory and multipliers are measured before and after (`machine_bounds`): a multiply-add is two of their operations.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from benchmarks.machine_bounds import bounds
from benchmarks.reporting import add_output_flags, as_json, check_positive, make_console
from rich.table import Table
from torch import Tensor

from cairn.kernels import cpu
from cairn.kernels.cpu.products import multiply
from cairn.kernels.int4 import quantize_int4

BYTES = 64 << 20
"""Of all weights together: more than one core's caches, or its share of them, have room for."""

PACKERS: Mapping[str, Callable[[Tensor], Any]] = MappingProxyType(
    {"bfloat16": cpu.pack, "int8": cpu.pack_int8, "int4": lambda weight: cpu.pack_int4(quantize_int4(weight))}
)
BOUNDS_OF: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "bfloat16": ("bfloat16_tile_gflops", "bfloat16_gflops", "float32_gflops"),
        "int8": ("int8_tile_gops", "int8_gops"),
    }
)
"""Of its multiplications, the first one that a machine has. Those in four bits are by instructions not measured."""


def quartile(weights: Sequence[Any], rows: int, inputs: int, seconds: float) -> float:
    """Seconds of one product."""
    x, times = torch.randn(rows, inputs).bfloat16(), list[float]()
    multiply(x, weights[0])
    begin = time.thread_time()
    while time.thread_time() - begin < seconds or len(times) < len(weights):
        start = time.thread_time()
        multiply(x, weights[len(times) % len(weights)])
        times.append(time.thread_time() - start)
    return sorted(times)[len(times) // 4]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    before = bounds(1, args.seconds)
    weight = (torch.randn(args.outputs, args.inputs) * 0.05).bfloat16()
    products = []
    for precision in args.precisions:
        one = PACKERS[precision](weight)
        num_bytes = sum(matrix.nbytes for matrix in one.matrices)
        weights = [one, *(PACKERS[precision](weight) for _ in range(BYTES // num_bytes))]
        for rows in args.rows:
            seconds = quartile(weights, rows, args.inputs, args.seconds)
            products.append(
                {
                    "precision": precision,
                    "rows": rows,
                    "us": 1e6 * seconds,
                    "gb_per_s": num_bytes / seconds / 1e9,
                    "gmacs": rows * weight.numel() / seconds / 1e9,
                }
            )
    after = bounds(1, args.seconds)
    return {"bounds": {name: max(rate, after[name]) for name, rate in before.items()}, "products": products}


def table_of(result: dict[str, Any]) -> Table:
    table = Table("weights", *("rows", "µs", "GB/s", "of memory's", "GMAC/s", "of the multipliers'"))
    for product in result["products"]:
        names = BOUNDS_OF.get(product["precision"], ())
        peak = next((result["bounds"][name] for name in names if name in result["bounds"]), None)
        memory = product["gb_per_s"] / result["bounds"]["memory_gb_per_s"]
        figures = (f"{product['us']:,.0f}", f"{product['gb_per_s']:.1f}", f"{memory:.2f}")
        of_peak = f"{2 * product['gmacs'] / peak:.2f}" if peak else "-"
        table.add_row(product["precision"], str(product["rows"]), *figures, f"{product['gmacs']:.1f}", of_peak)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", choices=PACKERS, default=list(PACKERS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 3, 4, 8, 12, 16, 64, 252])
    parser.add_argument("--outputs", type=int, default=5632)
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each figure")
    add_output_flags(parser, with_plot=False)
    args = parser.parse_args()
    check_positive(parser, args, "rows", "outputs", "inputs")
    result = measure(args)
    console = make_console()
    console.print(table_of(result))
    console.print(", ".join(f"{name} {rate:.1f}" for name, rate in result["bounds"].items()))
    if args.json:
        args.json.write_text(as_json(result))


if __name__ == "__main__":
    main()
