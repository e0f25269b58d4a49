"""Wheels of what cairn needs on a machine that has Python 3.12, torch for CUDA, Triton and numpy, and no network.

    python deploy/gpu_wheels.py FOLDER

Sets of wheels, each of at most 64 MiB: FOLDER/serve has all but numba, which is in FOLDER/numba with its compiler and
only for the CPU's kernels. For P/D, FOLDER/nixl-cu12 or FOLDER/nixl-cu13, by torch's CUDA. A larger set is left out
and said to be; exit code 1 if that is one of the first two.

    pip install --no-index --no-deps FOLDER/serve/*.whl
"""

import argparse
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

MIB = 2**20
MAX_SET = 64 * MIB
ROOT = Path(__file__).parent.parent
THERE = frozenset({"torch", "triton", "numpy"})
NUMBA = frozenset({"numba", "llvmlite"})
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 36)))
"""Up to glibc 2.35; llguidance asks for 2.31."""
NIXL = ("nixl-cu12", "nixl-cu13")
"""What `nixl` imports one of."""


def requirements() -> list[str]:
    """Of cairn at run time, without what is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [each for each in project["dependencies"] if Requirement(each).name not in THERE]


def download(wanted: Sequence[str], folder: Path, *options: str) -> None:
    """With all that they need, unless the options say otherwise; what is there already is thrown away again."""
    target = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--constraint", str(ROOT / "constraints.txt"), "--dest", str(folder)),
            *("--only-binary=:all:", "--implementation", "cp", "--python-version", "3.12", *target),
            *options,
            *wanted,
        ],
        check=True,
    )
    for wheel in wheels(folder):
        if name_of(wheel) in THERE:
            wheel.unlink()


def wheels(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)


def name_of(wheel: Path) -> str:
    return str(parse_wheel_filename(wheel.name)[0])


def size_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def fits(folder: Path) -> bool:
    """Prints what a set takes, and drops it if that is too much."""
    size = size_of(wheels(folder))
    print(f"{folder}: {len(wheels(folder))} wheels, {size / MIB:.1f} MiB of at most {MAX_SET // MIB}")
    for wheel in wheels(folder):
        print(f"  {wheel.stat().st_size / MIB:6.1f} MiB {wheel.name}")
    if size > MAX_SET:
        print(f"{folder} is left out: it is too large")
        shutil.rmtree(folder)
    return size <= MAX_SET


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    shutil.rmtree(folder, ignore_errors=True)
    serve, numba = folder / "serve", folder / "numba"
    download(requirements(), serve)
    numba.mkdir(parents=True)
    for wheel in wheels(serve):
        if name_of(wheel) in NUMBA:
            wheel.rename(numba / wheel.name)
    complete = all([fits(serve), fits(numba)])
    for name in NIXL:
        # Without what they require: both ask for torch, and `nixl` for either of them.
        download(("nixl", name), folder / name, "--no-deps")
        fits(folder / name)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
