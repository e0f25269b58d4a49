"""Requirements of the CUDA backend on the GPU and the model, and the memory that its sampler takes. Importable without
a GPU and without Triton."""

import torch

from cairn.errors import ConfigError

MIN_CAPABILITY = (8, 0)
"""Products of bfloat16 on tensor cores, and copies into shared memory that do not wait: from Ampere on."""

MIN_TRITON = (3, 6)

MAX_HEAD_DIM = 512
"""What a program of attention can keep of its queries and sums."""

DTYPES = (torch.bfloat16, torch.float32)

MAX_VOCAB = 2**19 - 1
"""So many weights of drawing add up to a number of 64 bits."""

SAMPLE_BLOCK, SAMPLE_BEST, SAMPLE_BINS, SAMPLE_LEVELS = 128, 128, 1024, 3
"""Of drawing: tokens of a block, the best ones that are looked at first, and the bins and levels of histograms."""

_SCORED_ROWS = 64
"""Prompt tokens whose logits are there at the same time."""

_ALIGNED = 1 << 20
"""What memory is cut in, some dozen pieces."""


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


def is_interpreted() -> bool:
    """Whether TRITON_INTERPRET=1 has the kernels run on the CPU, for tests. Raises ImportError without Triton."""
    import triton

    return bool(triton.knobs.runtime.interpret)


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
            f"{head_dim} (head_dim or global_head_dim in its config.json): serve it with the CPU's kernels"
        )


def check_vocabulary(vocab_size: int) -> None:
    """Raises ConfigError if the kernels do not draw from so many tokens."""
    if vocab_size > MAX_VOCAB:
        raise ConfigError(
            f"the CUDA backend draws from at most {MAX_VOCAB} tokens, and the model has {vocab_size} "
            "(vocab_size in its config.json): serve it with --device cpu"
        )


def sample_tiles(vocab_size: int) -> tuple[int, int]:
    """Tokens of a program of drawing, and places for the tiles of a vocabulary: both powers of 2."""
    tile = min(4096, max(1024, power_of_2(-(-vocab_size // 64))))
    return tile, power_of_2(-(-vocab_size // tile))


def sampling_bytes(num_rows: int, vocab_size: int, num_slots: int) -> int:
    """See `Kernels.sampling_bytes`: all rows changed, under masks of their own; or, in the pass before, the logits of
    prompt tokens whose log-probabilities are asked for."""
    tile, tiles = sample_tiles(vocab_size)
    blocks, words = tiles * tile // SAMPLE_BLOCK, -(-vocab_size // 32)
    of_row = 4 * (vocab_size + words + blocks) + 20 * tiles + 12 * SAMPLE_BEST + 8 * SAMPLE_LEVELS * SAMPLE_BINS + 128
    drawing, scoring = num_rows * of_row, _SCORED_ROWS * 4 * (vocab_size + blocks)
    return max(drawing, scoring) + 4 * num_slots * vocab_size + _ALIGNED


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of 2 that is at least n and `least`: what the extent of a block has to be."""
    return max(least, 1 << max(0, n - 1).bit_length())


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
