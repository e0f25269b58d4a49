"""llama.cpp's server, compiled on this machine for `benchmarks.peers`.

    python -m benchmarks.peer_llama FOLDER [--isa avx2] [--jobs N] [--python PYTHON]

The sources are those in the source package of llama-cpp-python, which has the server and the converter of checkpoints
with them; its Python part is not used, and neither is a network afterwards. Needs a C++ compiler, 1 GB of disk, and a
package index that pip reaches as it does for everything else, from which cmake and ninja come, too. Does nothing where
FOLDER already has this version. `--isa`: as CAIRN_MAX_CPU_ISA, and as there all instructions unless given; each has its
programs in a folder of its own, and the sources are compiled but once for what no kernel is in.
"""

import argparse
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.peer_setup import CHECK_SECONDS, PeerError, is_finished, make_environment, mark_finished, run

__all__ = ["ISAS", "NATIVE", "PROGRAMS", "VERSION", "programs_of", "set_up", "source_of"]

VERSION = "0.3.36"
"""Of llama-cpp-python: ggml 0.25.3, llama.cpp of the same month."""
TOOLS = ("cmake==4.4.5", "ninja==1.13.2", "scikit-build-core==1.1.2")
"""The last one is asked what the source package is called."""

PROGRAMS = ("llama-server", "llama-quantize")
BUILD_SECONDS = 4 * 3_600.0
NATIVE = "native"

_INSIDE = "vendor/llama.cpp/"
_TILES = "ggml/src/ggml-cpu/amx/mmq.cpp"
_CONFIGURE = "_tile_loadconfig(&tc);"
_AVX2 = ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")
_BEYOND = ("AVX_VNNI", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16", "AMX_TILE", "AMX_INT8", "AMX_BF16")
ISAS: Mapping[str, Mapping[str, bool]] = MappingProxyType(
    {
        NATIVE: {"NATIVE": True},
        "avx512": {"NATIVE": False, **dict.fromkeys(_AVX2, True), **dict.fromkeys(_BEYOND, False), "AVX512": True},
        "avx2": {"NATIVE": False, **dict.fromkeys(_AVX2, True), **dict.fromkeys(_BEYOND, False), "AVX512": False},
    }
)
"""ggml's switches: this processor's instructions, or what CAIRN_MAX_CPU_ISA leaves of them."""

_SWITCHES = (
    "CMAKE_BUILD_TYPE=Release BUILD_SHARED_LIBS=OFF GGML_CCACHE=OFF LLAMA_OPENSSL=OFF LLAMA_BUILD_TOOLS=ON "
    "LLAMA_BUILD_SERVER=ON LLAMA_BUILD_TESTS=OFF LLAMA_BUILD_EXAMPLES=OFF LLAMA_BUILD_APP=OFF LLAMA_BUILD_UI=OFF "
    "LLAMA_USE_PREBUILT_UI=OFF"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--isa", choices=ISAS, default=NATIVE, help="default: all of this processor's instructions")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time; default: a CPU each")
    parser.add_argument("--python", default=sys.executable, help="makes the virtual environment; default: this one")
    arguments = parser.parse_args()
    try:
        set_up(arguments.folder.resolve(), arguments.isa, arguments.jobs, arguments.python)
    except PeerError as error:
        print(f"peer_llama: {error}", file=sys.stderr)
        return 1
    print(f"llama.cpp of llama-cpp-python {VERSION}: {programs_of(arguments.folder, arguments.isa) / PROGRAMS[0]}")
    return 0


def programs_of(folder: Path, isa: str) -> Path:
    """The folder of the programs for these instructions."""
    return folder / isa


def source_of(folder: Path) -> Path:
    """llama.cpp's sources, and its converter."""
    return folder / "source"


def set_up(folder: Path, isa: str, jobs: int, maker: str) -> None:
    """Compile the programs for these instructions; the environment in `folder` is made by the interpreter `maker`.

    Raises PeerError. Begun again it goes on where it was.
    """
    if is_finished(programs_of(folder, isa), VERSION):
        return
    print(f"compiling llama.cpp ({isa}) in {folder}: once, it takes some ten minutes of a machine's cores", flush=True)
    if not is_finished(folder, VERSION):
        _unpack(folder, make_environment(folder, maker))
    _build(folder, isa, jobs)
    programs = programs_of(folder, isa)
    programs.mkdir(exist_ok=True)
    for name in PROGRAMS:
        shutil.copy2(folder / "build" / "bin" / name, programs / name)
    run([programs / PROGRAMS[0], "--version"], "llama-server is compiled and does not start", CHECK_SECONDS)
    mark_finished(programs, VERSION)


def _unpack(folder: Path, python: Path) -> None:
    pip = [python, "-m", "pip"]
    quiet = ["--quiet", "--disable-pip-version-check"]
    run(
        [*pip, "install", *quiet, *TOOLS], "cmake and ninja cannot be installed: the index that pip uses must have them"
    )
    # What tells pip the package's name is in the environment, and finds cmake there.
    environ = os.environ | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    with tempfile.TemporaryDirectory() as scratch:
        command = [*pip, "download", *quiet, "--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-python"]
        run(
            [*command, "--dest", scratch, f"llama-cpp-python=={VERSION}"],
            f"the source package of llama-cpp-python {VERSION} cannot be downloaded: the index that pip uses must "
            "have it",
            environ=environ,
        )
        (archive,) = Path(scratch).glob("*.tar.gz")
        unpack_source(archive, source_of(folder))
    mend_tiles(source_of(folder))
    mark_finished(folder, VERSION)


def unpack_source(archive: Path, target: Path) -> None:
    """llama.cpp's own folder of the source package, without what is around it. Raises PeerError."""
    with tarfile.open(archive) as packed:
        members = []
        for member in packed.getmembers():
            _, _, path = member.name.partition("/")
            if path.startswith(_INSIDE) and (member.isfile() or member.isdir()):
                member.name = path.removeprefix(_INSIDE)
                members.append(member)
        if not any(member.name == "CMakeLists.txt" for member in members):
            raise PeerError(f"{archive.name} is not as it was: llama.cpp's sources are not in {_INSIDE}")
        packed.extractall(target, members, filter="data")


def mend_tiles(source: Path) -> None:
    """Have the matrix unit's configuration in memory before it is read. Raises PeerError.

    GCC 12.2's intrinsic tells of the first 8 of its 64 bytes only: the stores of the others are left out as dead, and
    products with Q8_0 and Q4_0 end the process.
    """
    file = source / _TILES
    text = file.read_text()
    if text.count(_CONFIGURE) != 1:
        raise PeerError(f"llama.cpp of {VERSION} is not as it was: {_TILES} does not configure the matrix unit once")
    file.write_text(text.replace(_CONFIGURE, f'asm volatile("" : : "r"(&tc) : "memory"); {_CONFIGURE}'))


def _build(folder: Path, isa: str, jobs: int) -> None:
    cmake, build = folder / "bin" / "cmake", folder / "build"
    switches = [*_SWITCHES.split(), *(f"GGML_{name}={'ON' if on else 'OFF'}" for name, on in ISAS[isa].items())]
    run(
        [cmake, "-S", source_of(folder), "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={folder / 'bin' / 'ninja'}"]
        + [f"-D{switch}" for switch in switches],
        "llama.cpp cannot be configured: is there a C++ compiler?",
    )
    command = [cmake, "--build", build, "--parallel", str(jobs), "--target", *PROGRAMS]
    run(command, "llama.cpp cannot be compiled", BUILD_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
