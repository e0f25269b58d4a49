"""Which families the tests cover, in which formats and on which devices: tests take their parameters from here, and
`python tools/models_table.py` writes docs/models.md by it. Without torch.

To cover a family is to add its name: the tests of that list then run with it, and the table says so.
"""

from dataclasses import dataclass

__all__ = ["FORMATS", "WAYS", "Coverage"]


@dataclass(frozen=True)
class Coverage:
    """A column of the table. `device`: where it is tested; `tests`: the files, under tests/, whose parameters these
    are; `families`: names of `cairn make-model`, those first that `make test` runs; `+mtp`: with the checkpoint's head.
    `num_regular`: the tests run with so many of them, the first, in `make test` and `make test-more`, and with the
    others in `make test-long` alone; None: with all of them.
    """

    title: str
    device: str
    tests: tuple[str, ...]
    families: tuple[str, ...]
    num_regular: int | None = None

    @property
    def regular_families(self) -> tuple[str, ...]:
        return self.families[: self.num_regular]

    @property
    def long_families(self) -> tuple[str, ...]:
        return self.families[len(self.regular_families) :]

    @property
    def plain_families(self) -> frozenset[str]:
        """Whatever drafts."""
        return frozenset(name.removesuffix("+mtp") for name in self.families)


LOGITS = Coverage(
    "float32, bfloat16",
    "CPU",
    ("models/test_decoder_logits.py", "models/test_nemotron_h_logits.py", "models/test_qwen3_5_logits.py"),
    (
        *("nemotron_h", "qwen3_5", "qwen3_5_moe"),
        *("granitemoehybrid", "falcon_h1", "lfm2", "qwen3", "granite", "qwen3_moe", "lfm2_moe", "olmo_hybrid"),
        *("gpt_oss", "gemma4", "gemma3", "lfm3", "gemma2", "llama4"),
    ),
)

INT8 = Coverage(
    "int8",
    "CPU",
    ("models/test_served_int8.py",),
    (
        *("qwen3_5", "nemotron_h", "falcon_h1", "granitemoehybrid", "lfm2", "qwen3"),
        *(
            "qwen3_5_moe",
            "granite",
            "qwen3_moe",
            "lfm2_moe",
            "olmo_hybrid",
            "gpt_oss",
            "gemma4",
            "gemma3",
            "lfm3",
            "gemma2",
            "llama4",
        ),
    ),
)

INT4 = Coverage("int4", "CPU", ("models/test_served_int4.py",), ("qwen3_5", "nemotron_h", "qwen3_5_moe", "gpt_oss"))

FP8 = Coverage("FP8", "CPU", ("models/test_fp8.py",), ("qwen3_5", "qwen3_5_moe", "nemotron_h"))

PACKED = Coverage(
    "compressed-tensors, AWQ, GPTQ, NVFP4, MXFP4",
    "CPU",
    ("models/test_packed_checkpoints.py",),
    (
        *("qwen3_5", "qwen3_5_moe", "nemotron_h"),
        *("qwen3", "qwen3_moe", "lfm2", "lfm2_moe", "granite", "granitemoehybrid", "falcon_h1", "olmo_hybrid"),
    ),
)
"""All formats with the first, and stacks of experts with the second; the others with two formats."""

MXFP4_STACKS = Coverage("stacks of experts in MXFP4", "CPU", ("models/test_gpt_oss.py",), ("gpt_oss",))

GGUF = Coverage(
    "GGUF",
    "CPU",
    ("models/test_gguf.py",),
    (
        "qwen3_5+mtp",
        "granitemoehybrid",
        "nemotron_h+mtp",
        "lfm2_moe",
        "qwen3_5_moe+mtp",
        "lfm2",
        "qwen3",
        "qwen3_moe",
        "granite",
        "falcon_h1",
    ),
)

STATES = Coverage(
    "states in float16, bfloat16",
    "CPU",
    ("engine/test_state_dtypes.py",),
    ("qwen3_5", "nemotron_h", "qwen3_5_moe", "granitemoehybrid", "falcon_h1", "olmo_hybrid"),
)

IMAGES = Coverage("images", "CPU", ("engine/test_images_served.py",), ("qwen3_5_vl",))

ON_GPU = Coverage(
    "answers in float32", "GPU", ("kernels/test_cuda_engine.py",), ("lfm2", "qwen3_5", "nemotron_h", "gemma3")
)

LOGITS_ON_GPU = Coverage(
    "logits in float32 and bfloat16",
    "GPU",
    ("kernels/test_cuda_engine_load.py",),
    ("lfm2", "qwen3_5", "qwen3_5_moe", "falcon_h1"),
)
"""All but the first on a GPU alone."""

FP8_ON_GPU = Coverage("FP8", "GPU", ("kernels/test_cuda_fp8.py",), ("qwen3_5_moe", "nemotron_h"))

PACKED_ON_GPU = Coverage(
    "compressed-tensors, MXFP4", "GPU", ("kernels/test_cuda_codes.py",), ("qwen3_5", "qwen3_5_moe")
)
"""AWQ, GPTQ and the others are other tensors of the same kinds of codes."""

GGUF_ON_GPU = Coverage("GGUF", "GPU", ("kernels/test_cuda_codes.py",), ("lfm2",))

IMAGES_ON_GPU = Coverage("images", "GPU", ("kernels/test_cuda_engine.py",), ("qwen3_5_vl",))

FORMATS = (
    LOGITS,
    INT8,
    INT4,
    FP8,
    PACKED,
    MXFP4_STACKS,
    GGUF,
    STATES,
    IMAGES,
    ON_GPU,
    LOGITS_ON_GPU,
    FP8_ON_GPU,
    PACKED_ON_GPU,
    GGUF_ON_GPU,
    IMAGES_ON_GPU,
)
"""In what form a model's numbers are, by device."""

WHOLE_EXACTNESS = Coverage(
    "every bit with `--exact`, all cases",
    "CPU",
    ("engine/test_exactness.py",),
    (
        *("nemotron_h", "qwen3_5"),
        *("qwen3_5_moe", "granitemoehybrid", "falcon_h1", "lfm2", "qwen3", "granite", "qwen3_moe", "lfm2_moe"),
        *("olmo_hybrid", "gpt_oss", "gemma4", "gemma3", "lfm3", "gemma2", "llama4"),
    ),
    num_regular=2,
)

EXACTNESS = Coverage(
    "hits and preemption with `--exact`",
    "CPU",
    ("engine/test_exactness_families.py",),
    (
        *("granitemoehybrid", "falcon_h1", "lfm2", "qwen3", "granite", "qwen3_moe", "lfm2_moe", "olmo_hybrid"),
        *("gpt_oss", "gemma4", "gemma3", "lfm3", "gemma2", "llama4"),
    ),
)

RANKS = Coverage(
    "ranks with `--exact`",
    "CPU",
    ("engine/test_exactness_families.py", "engine/test_ranks_exactness.py"),
    ("nemotron_h", "lfm2", *(name for name in EXACTNESS.families if name != "lfm2")),
    num_regular=2,
)

DRAFTS = Coverage(
    "drafts with `--exact`",
    "CPU",
    ("engine/test_exactness_drafts.py",),
    (
        *("nemotron_h+mtp", "lfm2", "qwen3_5+mtp", "falcon_h1", "qwen3_5_moe", "qwen3", "gpt_oss", "gemma4", "llama4"),
        *("nemotron_h", "qwen3_5", "granitemoehybrid", "qwen3_5_moe+mtp", "granite", "qwen3_moe", "lfm2_moe"),
        *("olmo_hybrid", "gemma3", "lfm3", "gemma2"),
    ),
    num_regular=9,
)

RECORDED = Coverage(
    "recorded steps",
    "CPU",
    ("engine/test_recorded_decodes.py", "engine/test_nothing_is_compiled_late.py"),
    (
        *("nemotron_h", "qwen3_5", "qwen3_5_moe", "granitemoehybrid", "lfm2", "falcon_h1", "qwen3"),
        *("granite", "qwen3_moe", "lfm2_moe", "olmo_hybrid", "gpt_oss", "gemma4", "gemma3", "lfm3", "gemma2", "llama4"),
    ),
)
"""In bfloat16 and one of float32, int8 and int4 in turn; the first three, and `make test-long`, in all of them."""

HAND_OVERS = Coverage(
    "prefill and decode servers",
    "CPU",
    ("pd/test_families.py",),
    (
        *("qwen3_5", "qwen3_5_moe", "granitemoehybrid", "falcon_h1", "lfm2", "qwen3"),
        *(
            "granite",
            "qwen3_moe",
            "lfm2_moe",
            "olmo_hybrid",
            "nemotron_h",
            "gpt_oss",
            "gemma4",
            "gemma3",
            "lfm3",
            "gemma2",
            "llama4",
        ),
    ),
)

TIERS = Coverage(
    "tiers below the pool",
    "CPU",
    ("engine/test_tiers.py",),
    (
        *("qwen3_5", "nemotron_h", "qwen3_5_moe", "granitemoehybrid", "falcon_h1", "lfm2", "qwen3"),
        *("gemma3", "lfm3", "gpt_oss", "gemma4"),
    ),
)

WAYS = (WHOLE_EXACTNESS, EXACTNESS, RANKS, DRAFTS, RECORDED, HAND_OVERS, TIERS)
"""What is held to the answers of an engine without it."""
