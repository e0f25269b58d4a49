"""Requirements of the CUDA backend on the GPU and the model. Importable without a GPU and without Triton."""

import torch

from cairn.errors import ConfigError

MIN_CAPABILITY = (8, 0)
"""Products of bfloat16 on tensor cores, and copies into shared memory that do not wait: from Ampere on."""

MIN_TRITON = (3, 6)

MAX_HEAD_DIM = 256
"""What a program of attention can keep of its queries and sums."""

DTYPES = (torch.bfloat16, torch.float32)


def check_device(dtype: torch.dtype, head_dim: int, rank: int = 0, num_ranks: int = 1) -> None:
    """Raises ConfigError if there is not a GPU for each of `num_ranks`, or if that of `rank` cannot run a model of
    `dtype` whose attention heads have `head_dim` numbers (0 if it has none); the text names the limit and the fix.
    Where kernels are interpreted there is no GPU to ask."""
    try:
        import triton
    except ImportError as error:
        raise ConfigError(
            f"the CUDA backend needs Triton, which cannot be imported ({error}): install torch for CUDA, which brings "
            "it, or 'triton>=3.6,<4' beside the torch that is installed"
        ) from error
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if version < MIN_TRITON:
        raise ConfigError(
            f"the CUDA backend needs Triton {_dotted(MIN_TRITON)} or newer, not {triton.__version__}: install a newer "
            "torch for CUDA, which brings it (2.11 does)"
        )
    check_model(dtype, head_dim)
    if triton.knobs.runtime.interpret:
        return
    if torch.version.cuda is None:
        raise ConfigError(
            f"torch {torch.__version__} is built without CUDA: install one that is (https://pytorch.org/get-started)"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"torch {torch.__version__} sees no NVIDIA GPU: see what nvidia-smi lists, whether its driver is new "
            f"enough for CUDA {torch.version.cuda}, and whether CUDA_VISIBLE_DEVICES hides it"
        )
    if (num_gpus := torch.cuda.device_count()) < num_ranks:
        raise ConfigError(
            f"--tensor-parallel-size {num_ranks}: each rank computes on a GPU of its own, and torch sees {num_gpus}: "
            f"lower it to at most {num_gpus}, or see whether CUDA_VISIBLE_DEVICES hides some"
        )
    capability = torch.cuda.get_device_capability(rank)
    if capability < MIN_CAPABILITY:
        raise ConfigError(
            f"{torch.cuda.get_device_name(rank)} has compute capability {_dotted(capability)}, and the CUDA backend "
            f"needs {_dotted(MIN_CAPABILITY)} (Ampere) or newer: choose another one with CUDA_VISIBLE_DEVICES"
        )


def check_model(dtype: torch.dtype, head_dim: int) -> None:
    """Raises ConfigError if the kernels take no model of `dtype` whose attention heads have `head_dim` numbers."""
    if dtype not in DTYPES:
        raise ConfigError(
            f"the CUDA backend computes in bfloat16 and float32, not in {str(dtype).removeprefix('torch.')}: ask for "
            "one of them with --dtype"
        )
    if head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"the CUDA backend's attention takes heads of at most {MAX_HEAD_DIM} numbers, and the model's have "
            f"{head_dim} (head_dim in its config.json): serve it with the CPU's kernels"
        )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
