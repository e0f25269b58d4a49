"""Qwen3.5's vision tower: transformers' own module, its weights read by our loader.

An image goes in as pixels and comes out as one vector for each merge x merge patches, of the language model's width.
Every image is encoded by itself, so its bits do not depend on what else is in a request.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from cairn.errors import ModelError
from cairn.models.config_schema import Fields, custom, integer, only, parse_config
from cairn.models.contract import TensorLoader
from cairn.models.families import family_of
from cairn.models.families.qwen3_5 import DENSE_RECIPE, IMAGE_TOKENS
from cairn.models.image_processor import FILE, Grid, ImageProcessor
from cairn.models.random_weights.make_tokenizer import CHAT_TEMPLATE
from cairn.models.random_weights.recipe import CheckpointOptions, Recipe, by_size
from cairn.models.rotary import rope_fields
from cairn.models.weights.device_copy import CopyStream, load_weights, stream_to
from cairn.models.weights.loader import WeightReader, account, read_config

PREFIX = "model.visual."
"""How the names of the tower's tensors begin."""


ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "silu")


def _rope_theta(fields: Fields, name: str, config: Any) -> float:
    return rope_fields(fields, "default", "axial").number(name, 1, 1e12, default=10_000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """`vision_config` of config.json. `num_position_embeddings`: entries of the learned square grid of positions."""

    depth: int = integer(1, 1024)
    hidden_size: int = integer(1, 1 << 16)
    intermediate_size: int = integer(1, 1 << 18)
    num_heads: int = integer(1, 1024)
    in_channels: int = only(3)
    patch_size: int = integer(1, 256)
    spatial_merge_size: int = integer(1, 16)
    temporal_patch_size: int = integer(1, 16)
    out_hidden_size: int = integer(1, 1 << 18)
    num_position_embeddings: int = integer(1, 1 << 24)
    hidden_act: str = only(*ACTIVATIONS)
    rope_theta: float = custom(_rope_theta)


def parse(raw: Mapping[str, object]) -> VisionConfig:
    """`vision_config` -> config. Raises ModelError that names the field."""
    config = parse_config(VisionConfig, Fields(raw, path_of="vision_config.{}".format))
    if config.hidden_size % (4 * config.num_heads):
        raise ModelError("config.json: vision_config.hidden_size must be a multiple of 4 x num_heads")
    if math.isqrt(config.num_position_embeddings) ** 2 != config.num_position_embeddings:
        raise ModelError("config.json: vision_config.num_position_embeddings must be a square number")
    if deepstack := raw.get("deepstack_visual_indexes"):
        raise ModelError(f"config.json: vision_config.deepstack_visual_indexes {deepstack!r} is not implemented")
    return config


def tensors(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the tower, by its published name, with its shape."""
    return {PREFIX + name: tuple(tensor.shape) for name, tensor in _module(config).state_dict().items()}


def tower_bytes(config: VisionConfig, dtype: torch.dtype) -> int:
    """Of all tensors of the tower."""
    return sum(map(math.prod, tensors(config).values())) * dtype.itemsize


def read_vision(folder: Path) -> VisionConfig | None:
    """What a checkpoint folder's config.json says of a tower; None where it has none, or one of a family whose text
    alone is served. Raises ModelError."""
    whole = read_config(folder)
    raw = whole.get("vision_config") if family_of(whole).reads_images else None
    if raw is not None and not isinstance(raw, dict):
        raise ModelError(f"config.json: vision_config must be an object, not a {type(raw).__name__}")
    if raw is None:
        return None
    config, text = parse(raw), whole.get("text_config")
    if isinstance(text, dict) and text.get("hidden_size", config.out_hidden_size) != config.out_hidden_size:
        raise ModelError(
            f"config.json: vision_config.out_hidden_size {config.out_hidden_size} must be text_config.hidden_size "
            f"{text['hidden_size']!r}, as an image's vectors stand among those of tokens"
        )
    return config


def load_tower(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device | None = None,
    send: "SendArrays | None" = None,
    stream: CopyStream | None = None,
) -> "VisionTower | None":
    """The tower of a checkpoint folder in `dtype`, or None where config.json has no vision_config.

    Accounts for every tensor whose name begins as the tower's do. `device`: where its weights and vectors lie, None for
    the host. `send`: what brings an image's arrays there. `stream`: what copies its weights there, None for the
    device's own. Raises ModelError that names the file, the field or the tensor.
    """
    config = read_vision(folder)
    if config is None:
        return None
    processor = ImageProcessor.read(folder)
    expected, place = tensors(config), device or torch.device("cpu")
    with WeightReader(folder, dtype) as reader:
        headers = {name: header for name, header in reader.headers.items() if name.startswith(PREFIX)}
        problems = account(headers, expected).problems
        if problems:
            raise ModelError(f"{folder}: {'; '.join(problems[:5])}; --language-model-only does without them")

        def read_all() -> None:
            for name, shape in expected.items():
                reader.load(name, shape)

        with load_weights(reader, expected, read_all, stream or stream_to(place), what="vision tower"):
            return VisionTower(config, processor, reader.load, dtype, place, send or _on_host)


SendArrays = Callable[[Sequence[NDArray[Any]]], list[Tensor]]
"""Arrays of the host -> the same on the device, in one copy."""


class VisionTower:
    """The tower of one checkpoint. One thread only. An image's pixels and the places of its patches go to its device in
    one copy, and nothing comes back: the host knows every shape."""

    def __init__(
        self,
        config: VisionConfig,
        processor: ImageProcessor,
        load: TensorLoader,
        dtype: torch.dtype,
        device: torch.device,
        send: SendArrays,
    ) -> None:
        """Raises ModelError where processor and config disagree, or for a tensor that cannot be read."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        for name, of_processor, of_config in (
            ("patch_size", processor.patch, config.patch_size),
            ("merge_size", processor.merge, config.spatial_merge_size),
            ("temporal_patch_size", processor.temporal, config.temporal_patch_size),
        ):
            if of_processor != of_config:
                raise ModelError(
                    f"preprocessor_config.json and config.json's vision_config disagree on {name}: "
                    f"{of_processor} and {of_config}"
                )
        self._config = config
        self._dtype = dtype
        self._device = device
        self._send = send
        self._max_pixels = processor.max_pixels
        self._processor = Qwen2VLImageProcessorPil(
            size={"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels},
            patch_size=processor.patch,
            merge_size=processor.merge,
            temporal_patch_size=processor.temporal,
            resample=processor.resample,
            rescale_factor=processor.scale,
            image_mean=list(processor.mean),
            image_std=list(processor.std),
        )
        self._module = _load_module(config, load, dtype, device)

    @property
    def merge(self) -> int:
        return self._config.spatial_merge_size

    @property
    def hidden_size(self) -> int:
        return self._config.out_hidden_size

    def encode(self, width: int, height: int, rgb: bytes, bounds: tuple[int, int] | None = None) -> tuple[Grid, Tensor]:
        """An image, uint8 [height, width, 3] -> its patches in time, height and width, and its vectors
        [patches / merge^2, hidden]. `bounds`: least and most pixels after resizing, instead of the checkpoint's. The
        same bits every time."""
        image = Image.frombytes("RGB", (width, height), rgb)
        resized: dict[str, Any] = (
            {} if bounds is None else {"size": {"shortest_edge": bounds[0], "longest_edge": bounds[1]}}
        )
        made = self._processor(images=[image], return_tensors="pt", **resized)
        frames, rows, columns = made["image_grid_thw"][0].tolist()
        return (frames, rows, columns), self._forward(made["pixel_values"].to(self._dtype), made["image_grid_thw"])

    def encode_largest(self, max_area: int, max_tokens: int | None) -> None:
        """Encode as many black pixels as an image may have, to see what memory that takes. `max_area`: pixels that a
        request may have an image resized to, where the checkpoint does not allow more; `max_tokens`: of a prompt."""
        config = self._config
        num_tokens = max(max_area, self._max_pixels) // (config.patch_size * config.spatial_merge_size) ** 2
        num_tokens = max(1, num_tokens if max_tokens is None else min(num_tokens, max_tokens))
        grid = torch.tensor([[1, config.spatial_merge_size, num_tokens * config.spatial_merge_size]])
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self._forward(torch.zeros(int(grid.prod()), width, dtype=self._dtype), grid)

    def _forward(self, pixels: Tensor, grid: Tensor) -> Tensor:
        """pixels [patches, ...] and grid [1, 3] on the host -> vectors [patches / merge^2, hidden] on the device."""
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

        module, merge = self._module, self._config.spatial_merge_size
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid, module.num_grid_per_side, module.interpolation_mode, module.interpolation_align_corners, merge
        )
        places = get_vision_position_ids(grid, merge)
        # numpy knows no bfloat16
        arrays = [each.contiguous().numpy() for each in (pixels.view(torch.uint8), indices, weights, places)]
        with torch.inference_mode():
            sent, indices, weights, places = self._send(arrays)
            # How many patches are attended to at once is read on the host: there the grid stays.
            output = module(
                sent.view(self._dtype), grid, interp_indices=indices, interp_weights=weights, position_ids=places
            )
            vectors: Tensor = output.pooler_output
        return vectors


def _on_host(arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


def _module(config: VisionConfig) -> Any:
    """transformers' module on the meta device, so that each weight that it gets is in memory once."""
    # Here and not above: of models without a tower nothing needs transformers' model code.
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    sizes = asdict(config)
    rope = {"rope_type": "axial", "rope_theta": sizes.pop("rope_theta")}
    published = Qwen3_5VisionConfig(**sizes, rope_parameters=rope)
    with torch.device("meta"):
        return Qwen3_5VisionModel(published)


def _load_module(config: VisionConfig, load: TensorLoader, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' module with the checkpoint's weights."""
    module = _module(config)
    # Its angles are computed and not stored: made again, in memory, and in float32 whatever the dtype.
    module.rotary_pos_emb = type(module.rotary_pos_emb)(module.config).to(device)
    weights = {
        name: load(PREFIX + name, tuple(tensor.shape)).to(device, dtype) for name, tensor in module.state_dict().items()
    }
    module.load_state_dict(weights, strict=True, assign=True)
    if device.type != "cpu":
        module.patch_embed = _PatchProduct(module.patch_embed.proj)
    module.train(False)
    return module.requires_grad_(False)


class _PatchProduct(torch.nn.Module):
    """What transformers has as a convolution in three dimensions whose kernels lie side by side is one product of
    patches and weights. On the CPU it stays a convolution, for transformers' very bits."""

    def __init__(self, proj: torch.nn.Conv3d) -> None:
        super().__init__()
        self._proj = proj

    def forward(self, patches: Tensor) -> Tensor:
        return torch.nn.functional.linear(patches, self._proj.weight.flatten(1), self._proj.bias)


_START, _END, _IMAGE, _VIDEO = IMAGE_TOKENS

_SHOWN = (
    "{%- macro shown(content) -%}{%- if content is string -%}{{- content -}}{%- else -%}"
    "{%- for part in content or [] -%}{%- if part.type == 'image' -%}{{- '"
    + _START
    + _IMAGE
    + _END
    + "' -}}{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}\n"
)
"""Content as text: parts follow each other with nothing between, as in the published template."""


def _beside_vision(raw: dict[str, Any], options: CheckpointOptions) -> dict[str, Any]:
    """config.json of the text model's fields and the tower's."""
    vision = raw.pop("vision_config")
    del raw["architectures"]
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": options.dtype,
        "eos_token_id": options.eos_token_id,
        "image_token_id": options.tokens[_IMAGE],
        "pad_token_id": options.pad_token_id,
        "text_config": raw,
        "tie_word_embeddings": False,
        "video_token_id": options.tokens[_VIDEO],
        "vision_config": vision,
        "vision_end_token_id": options.tokens[_END],
        "vision_start_token_id": options.tokens[_START],
    }


_TOWER: Mapping[str, Any] = MappingProxyType(
    {
        "deepstack_visual_indexes": [],
        "depth": by_size(2, 4),
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": by_size(64, 256),
        "in_channels": 3,
        "intermediate_size": by_size(128, 512),
        "model_type": "qwen3_5",
        "num_heads": by_size(4, 8),
        "num_position_embeddings": 64,
        "out_hidden_size": DENSE_RECIPE.sizes["hidden_size"],
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
)

_PROCESSOR: Mapping[str, Any] = MappingProxyType(
    {
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": 16,
        "size": {"longest_edge": 1024 * 1024, "shortest_edge": 32 * 32},
        "temporal_patch_size": 2,
    }
)
"""As published, but for smaller bounds: an image has 1 to 1,024 tokens."""

RECIPE: Recipe = replace(
    DENSE_RECIPE,
    sizes={**DENSE_RECIPE.sizes, "vision_config": _TOWER},
    wrap=_beside_vision,
    # The tower's own come first: its norms are not stored less 1.
    spreads={"merger.norm.weight": (1.0, 0.1), "pos_embed.weight": (0.0, 0.5), **DENSE_RECIPE.spreads},
    gains={"merger.linear_fc2.weight": 2.0, **DENSE_RECIPE.gains},
    chat_template=_SHOWN + CHAT_TEMPLATE.replace("message.content", "shown(message.content)"),
    files={FILE: _PROCESSOR},
    other_tensors=lambda raw: tensors(parse(raw["vision_config"])),
)
"""Checkpoints of a text model and a vision tower."""
