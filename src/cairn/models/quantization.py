"""Which quantization a checkpoint says it has. Two are read, both with FP8 (e4m3) weights:

fp8         Qwen's and DeepSeek's: `weight_scale_inv`, one factor for each block of 128 x 128 numbers
            (transformers' FineGrainedFP8Config; `quantization_config` of config.json)
modelopt    NVIDIA ModelOpt's FP8: `weight_scale`, one factor for a tensor; `input_scale`, `k_scale` and `v_scale` are
            for those who also compute or cache in FP8 (`hf_quant_config.json`, or `quantization_config`)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cairn.errors import ModelError
from cairn.models.config_schema import Fields
from cairn.models.tensor_headers import read_json

MODELOPT_FILE = "hf_quant_config.json"
MAX_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Quantization:
    """`block`: the rows and columns of a weight that have one factor; None where all of it has one."""

    block: tuple[int, int] | None

    @property
    def scale(self) -> str:
        """The last part of a factor's name; what is before it is the weight's."""
        return "weight_scale" if self.block is None else "weight_scale_inv"


def read_quantization(folder: Path, raw: Mapping[str, object]) -> Quantization | None:
    """From config.json's fields and, where they say nothing, from hf_quant_config.json. None: not quantized.

    Raises ModelError that names the field of a quantization that is not read.
    """
    given = raw.get("quantization_config")
    if given is None:
        path = folder / MODELOPT_FILE
        return _modelopt(MODELOPT_FILE, read_json(path).get("quantization")) if path.exists() else None
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: quantization_config must be an object, not {type(given).__name__}")
    method = given.get("quant_method")
    if method == "modelopt":
        return _modelopt("config.json: quantization_config", given)
    if method != "fp8":
        raise ModelError(f"config.json: quant_method {method!r} is not read; known: fp8, modelopt")
    fields = Fields(given)
    fields.only("fmt", "e4m3")
    block = fields.integers("weight_block_size", 1, MAX_BLOCK)
    if len(block) != 2:
        raise ModelError(f"config.json: weight_block_size must be two numbers, as [128, 128], not {list(block)}")
    return Quantization((block[0], block[1]))


def _modelopt(where: str, given: object) -> Quantization:
    algorithm = given.get("quant_algo") if isinstance(given, Mapping) else None
    if algorithm != "FP8":
        raise ModelError(f"{where}: quant_algo {algorithm!r} is not read; known: FP8")
    return Quantization(None)
