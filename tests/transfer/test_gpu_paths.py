"""The line at the start says what the machine tells, and no more."""

import pytest

from cairn.transfer.links.gpu_paths import describe_gpu_paths

LOADED = "nvidia_peermem 20480 0 - Live 0x0\nib_core 1 2 - Live 0x0\n"


@pytest.fixture
def adapters(tmp_path):
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / "infiniband" / name).mkdir(parents=True)
    return tmp_path / "infiniband"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LOADED, "(nvidia_peermem is loaded)"),
        (LOADED + "gdrdrv 1 0 - Live 0x0\n", "(nvidia_peermem is loaded, gdrcopy is loaded)"),
        ("nv_peer_mem 1 0 - Live 0x0\n", "(nv_peer_mem is loaded)"),
        ("not_nvidia_peermem 1 nvidia_peermem, Live 0x0\n", "(nvidia_peermem is not loaded, so the driver has to"),
        (None, "(whether nvidia_peermem is loaded cannot be seen)"),
    ],
)
def test_what_is_there_for_rdma(tmp_path, adapters, text, said):
    modules = tmp_path / "modules"
    if text is not None:
        modules.write_text(text)
    line = describe_gpu_paths(3, {}, modules, adapters)
    assert "memory of GPU 3" in line and "GPUDirect RDMA by mlx5_0, mlx5_1 where" in line and said in line
    assert "UCX_TLS is not set" in line


def test_without_an_adapter_nothing_is_promised(tmp_path):
    line = describe_gpu_paths(0, {"UCX_TLS": "tcp,cuda_copy"}, tmp_path / "modules", tmp_path / "none")
    assert "by way of host memory, because there is no RDMA adapter" in line and "GPUDirect" not in line
    assert "UCX_TLS=tcp,cuda_copy." in line


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_cuda_ipc_does_not_share(tmp_path, name):
    """torch maps such segments itself, and a handle of CUDA IPC is for what cudaMalloc gave."""
    paths = tmp_path / "modules", tmp_path / "none"
    plain = describe_gpu_paths(0, {name: "max_split_size_mb:64, expandable_segments:False"}, *paths)
    assert "on this host: CUDA IPC where UCX can use it" in plain
    line = describe_gpu_paths(0, {name: "max_split_size_mb:64, expandable_segments: True"}, *paths)
    assert "on this host: by way of host memory, because CUDA IPC shares no expandable segments" in line
