"""Which ways there are for pages in a GPU's memory, as far as this machine tells: for one line at the start.

UCX chooses a way for every peer, and tells nobody but those who run it with UCX_PROTO_INFO=y.
"""

import os
from collections.abc import Mapping
from pathlib import Path

_MODULES, _ADAPTERS = Path("/proc/modules"), Path("/sys/class/infiniband")
_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that say how torch takes memory of the GPU."""

_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")


def describe_gpu_paths(
    device: int,
    environment: Mapping[str, str] = os.environ,
    modules: Path = _MODULES,
    adapters: Path = _ADAPTERS,
) -> str:
    """`modules`: what the kernel has loaded, as /proc/modules lists it. `adapters`: a folder with an entry for every
    RDMA adapter."""
    tls, on_host = environment.get("UCX_TLS"), "CUDA IPC where UCX can use it, else by way of host memory"
    allocator = ",".join(environment.get(name, "") for name in _ALLOCATORS)
    if "expandable_segments:true" in allocator.replace(" ", "").lower():
        on_host = f"by way of host memory, because CUDA IPC shares no expandable segments ({_ALLOCATORS[0]})"
    allowed = "UCX_TLS is not set: UCX may use all it has" if tls is None else f"UCX_TLS={tls}"
    return (
        f"pages lie in the memory of GPU {device}, registered with NIXL. {allowed}. "
        f"To servers on this host: {on_host}. To other hosts: {_rdma(modules, adapters)}. "
        "UCX_PROTO_INFO=y prints what it takes"
    )


def _rdma(modules: Path, adapters: Path) -> str:
    names = sorted(entry.name for entry in adapters.iterdir()) if adapters.is_dir() else []
    if not names:
        return "by way of host memory, because there is no RDMA adapter"
    loaded = _loaded(modules)
    if loaded is None:
        module_state = "whether nvidia_peermem is loaded cannot be seen"
    elif peers := [name for name in _PEER_MODULES if name in loaded]:
        module_state = f"{peers[0]} is loaded"
    else:
        module_state = "nvidia_peermem is not loaded, so the driver has to offer dma-buf"
    copies = "" if loaded is None or "gdrdrv" not in loaded else ", gdrcopy is loaded"
    return (
        f"GPUDirect RDMA by {', '.join(names)} where GPU and adapter can ({module_state}{copies}), else by host memory"
    )


def _loaded(modules: Path) -> frozenset[str] | None:
    try:
        return frozenset(line.partition(" ")[0] for line in modules.read_text().splitlines())
    except OSError:
        return None
