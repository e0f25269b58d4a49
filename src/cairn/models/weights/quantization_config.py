"""How a checkpoint says that it is quantized: `quantization_config` of config.json, or ModelOpt's own file."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from cairn.errors import ModelError
from cairn.models.config_schema import Fields
from cairn.models.weights.fp4_layouts import Fp4Bytes, Mxfp4Blocks
from cairn.models.weights.integer_layouts import AwqWords, CompressedBytes, CompressedIntegers, GptqWords
from cairn.models.weights.packed_layouts import WHOLE, Bits, PackedLayout
from cairn.models.weights.quantization import Quantization
from cairn.models.weights.tensor_headers import read_json

MODELOPT_FILE = "hf_quant_config.json"
FIELD = "quantization_config"
MAX_BLOCK = 1 << 16
MAX_GROUPS = 1 << 16
"""Of a config's groups of layers, and of layers that it names."""

MODELOPT_NVFP4 = Fp4Bytes("NVFP4", sizes=(16,), codes="weight", factor="weight_scale_2", divides=False)
COMPRESSED_NVFP4 = Fp4Bytes("NVFP4", sizes=(16,))
COMPRESSED_MXFP4 = Fp4Bytes("MXFP4", sizes=(32,), scale_dtype="U8", factor=None)
MXFP4_BLOCKS = Mxfp4Blocks("MXFP4", sizes=(32,))


def read_quantization(folder: Path, raw: Mapping[str, object]) -> Quantization | None:
    """From config.json's fields and, where they say nothing, from hf_quant_config.json. None: not quantized.

    Raises ModelError that names the field of a quantization that is not read.
    """
    values = raw.get(FIELD)
    if values is None:
        path = folder / MODELOPT_FILE
        where = f"{MODELOPT_FILE}: quantization"
        return _modelopt(where, read_json(path).get("quantization")) if path.exists() else None
    if not isinstance(values, Mapping):
        raise ModelError(f"config.json: {FIELD} must be an object, not {type(values).__name__}")
    method = values.get("quant_method")
    if method == "modelopt":
        return _modelopt(f"config.json: {FIELD}", values)
    if method == "bitsandbytes":
        raise ModelError(
            f"config.json: {FIELD}.quant_method 'bitsandbytes' is not read: serve the checkpoint that it was made of "
            "with --quantization int4 or int8, or one in AWQ, GPTQ or compressed-tensors"
        )
    if method not in _READERS:
        known = ", ".join(sorted((*_READERS, "modelopt")))
        raise ModelError(f"config.json: {FIELD}.quant_method {method!r:.60} is not read; known: {known}")
    return _READERS[str(method)](Fields(values, f"config.json ({method})", f"{FIELD}.{{}}".format))


def _fp8(fields: Fields) -> Quantization:
    fields.only("fmt", "e4m3")
    fields.only("activation_scheme", "dynamic", "static")
    return Quantization("fp8", _block(fields, "weight_block_size"))


def _block(fields: Fields, name: str) -> tuple[int, int] | None:
    if not fields.has(name):
        return None
    block = fields.integers(name, 1, MAX_BLOCK)
    if len(block) != 2:
        raise fields.error(f"{fields.path_of(name)} must be absent or two numbers, as [128, 128], not {list(block)}")
    return block[0], block[1]


def _modelopt(where: str, values: object) -> Quantization:
    fields = values if isinstance(values, Mapping) else {}
    algorithm = fields.get("quant_algo")
    if algorithm == "FP8":
        return Quantization("modelopt")
    if algorithm == "NVFP4":
        return Quantization("modelopt", layouts=(MODELOPT_NVFP4,))
    if algorithm != "MIXED_PRECISION":
        raise ModelError(f"{where}.quant_algo {algorithm!r:.60} is not read; known: FP8, NVFP4, MIXED_PRECISION")
    layers = fields.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise ModelError(f"{where}.quantized_layers must be an object of layers for MIXED_PRECISION")
    for name, layer in layers.items():
        each = layer.get("quant_algo") if isinstance(layer, Mapping) else None
        if each not in ("FP8", "NVFP4"):
            raise ModelError(
                f"{where}.quantized_layers.{name!s:.200}.quant_algo {each!r:.60} is not read; known: FP8, NVFP4"
            )
    return Quantization("modelopt", layouts=(MODELOPT_NVFP4,))


def _awq(fields: Fields) -> Quantization:
    fields.only("bits", 4)
    fields.only("version", "gemm", "GEMM")
    fields.only("zero_point", True)
    return Quantization("awq", layouts=(AwqWords("AWQ", sizes=(_group_size(fields),)),))


def _gptq(fields: Fields) -> Quantization:
    fields.only("checkpoint_format", "gptq", "gptq_v2")
    layout = _gptq_words(fields, "GPTQ", fields.get("checkpoint_format") != "gptq_v2")
    return Quantization("gptq", layouts=(layout,))


def _gptq_words(fields: Fields, name: str, zeros_less_one: bool) -> GptqWords:
    fields.only("pack_dtype", "int32")
    bits = _bits(fields, "bits")
    return GptqWords(name, bits, sizes=(_group_size(fields),), zeros_less_one=zeros_less_one)


def _auto_round(fields: Fields) -> Quantization:
    fields.only("data_type", "int")
    fields.only("packing_format", "auto_round:auto_gptq", "auto_round:auto_awq", "auto_gptq", "auto_awq")
    if str(fields.get("packing_format")).endswith("awq"):
        fields.only("bits", 4)
        return Quantization("auto-round", layouts=(AwqWords("AutoRound's AWQ", sizes=(_group_size(fields),)),))
    return Quantization("auto-round", layouts=(_gptq_words(fields, "AutoRound's GPTQ", zeros_less_one=True),))


def _bits(fields: Fields, name: str) -> tuple[Bits, ...]:
    fields.only(name, 4, 8)
    return (4,) if fields.integer(name, 4, 8) == 4 else (8,)


def _group_size(fields: Fields) -> int:
    """`WHOLE` for -1."""
    return WHOLE if fields.get("group_size") == WHOLE else fields.integer("group_size", 1, MAX_BLOCK)


def _mxfp4(fields: Fields) -> Quantization:
    return Quantization("mxfp4", layouts=(MXFP4_BLOCKS,))


def _compressed_tensors(fields: Fields) -> Quantization:
    """Each group of layers may have a format of its own; which layers it is for their tensors say."""
    for name in ("transform_config", "sparsity_config"):
        value = fields.get(name)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise fields.error(f"{fields.path_of(name)} is not read: the weights are only a part of what it describes")
    layouts: list[PackedLayout] = []
    block = None
    for group in _config_groups(fields):
        layout, group_block = _compressed_layout(fields, group)
        layouts += [] if layout is None else [layout]
        block = block or group_block
    return Quantization("compressed-tensors", block, _merge_layouts(layouts))


def _config_groups(fields: Fields) -> Iterator[Fields]:
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or len(groups) > MAX_GROUPS:
        raise fields.error(f"{fields.path_of('config_groups')} must be an object of groups of layers")
    for name, group in groups.items():
        path = f"{FIELD}.config_groups.{name!s:.60}"
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if weights is None and isinstance(group, Mapping):
            continue  # of activations or of the cache
        if not isinstance(weights, Mapping):
            raise fields.error(f"{path}.weights must be an object")
        form = group.get("format") or fields.get("format")
        file = "config.json (compressed-tensors)"
        yield Fields({**weights, "format": form}, file, f"{path}.weights.{{}}".format)


def _compressed_layout(fields: Fields, group: Fields) -> tuple[PackedLayout | None, tuple[int, int] | None]:
    """A group's layout in codes, None for FP8; and the blocks of FP8, if there are any."""
    group.only("format", *_COMPRESSED)
    form = str(group.get("format"))
    if form == "naive-quantized":
        form = "float-quantized" if group.get("type") == "float" else "int-quantized"
    if form == "nvfp4-pack-quantized":
        return COMPRESSED_NVFP4, None
    if form == "mxfp4-pack-quantized":
        return COMPRESSED_MXFP4, None
    if form == "float-quantized":
        group.only("num_bits", 8)
        return None, _block(group, "block_structure") if group.get("strategy") == "block" else None
    group.only("strategy", "group", "channel", "tensor")
    size = _group_size(group) if group.get("strategy") == "group" else WHOLE
    if form == "int-quantized":
        group.only("num_bits", 8)
        return CompressedBytes("compressed-tensors int-quantized", (8,), (size,)), None
    bits = _bits(group, "num_bits")
    return CompressedIntegers("compressed-tensors pack-quantized", bits, (size,)), None


def _merge_layouts(layouts: list[PackedLayout]) -> tuple[PackedLayout, ...]:
    """Those of one class as one of all their bits and sizes: which of them a matrix has its tensors' shapes say."""
    merged: dict[tuple[type, str, str], PackedLayout] = {}
    for layout in layouts:
        key = type(layout), layout.format, layout.key
        before = merged.get(key)
        if before is None:
            merged[key] = layout
        else:
            bits = tuple(dict.fromkeys((*before.bits, *layout.bits)))
            sizes = tuple(dict.fromkeys((*before.sizes, *layout.sizes)))
            merged[key] = type(layout)(layout.format, bits, sizes)
    return tuple(merged.values())


_COMPRESSED = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
)

_READERS: Mapping[str, Callable[[Fields], Quantization]] = MappingProxyType(
    {
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        "awq": _awq,
        "gptq": _gptq,
        "auto-round": _auto_round,
        "mxfp4": _mxfp4,
        # What a GGUF file says in config.json's words: of each tensor its type tells.
        "gguf": lambda fields: Quantization("gguf"),
    }
)
