"""What a model must remember, from its config.json alone: replay loads neither torch nor the models.

The sums are those of `cairn.models`, for the families named in `_READERS` and one rank:

    page         attention layers x kv heads x 2 x head_dim numbers a token, of 2 bytes
    checkpoint   hidden state + recurrent layers x ((kernel - 1) x channels of the convolution x 2 bytes + state)
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.errors import ConfigError

__all__ = ["LAYOUT_NAMES", "Remembers", "layout_for", "remembers"]

DTYPE_BYTES = 2
"""Bytes of one number of keys, values, convolution and hidden state: bfloat16."""

STATE_DTYPES = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
MOST = 1 << 20
MAX_CONFIG_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Remembers:
    """Numbers that a model remembers: `token_numbers` keys and values a token; of each of `recurrent_layers` the last
    `conv_rows` inputs of `conv_channels` channels, and `state_numbers` of recurrent state."""

    hidden_size: int
    token_numbers: int
    recurrent_layers: int
    conv_rows: int
    conv_channels: int
    state_numbers: int

    def layout(self, block_size: int, state_bytes: int) -> CacheLayout:
        """Bytes of pages and checkpoints, `state_bytes` a number of recurrent state."""
        conv = self.conv_rows * self.conv_channels * DTYPE_BYTES
        return CacheLayout(
            block_size=block_size,
            page_bytes=self.token_numbers * DTYPE_BYTES * block_size,
            page_units=1,
            groups=(AttentionGroup("full", block_size),),
            header_bytes=self.hidden_size * DTYPE_BYTES,
            state_bytes=self.recurrent_layers * (conv + self.state_numbers * state_bytes),
            state_units=1,
        )


def _qwen(layers: int) -> Mapping[str, object]:
    """What Qwen3.5-35B-A3B and Qwen3-Next-80B-A3B have in common, with `layers` layers."""
    return MappingProxyType(
        {
            "hidden_size": 2048,
            "num_hidden_layers": layers,
            "full_attention_interval": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        }
    )


_PUBLISHED: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "nemotron-3-nano": MappingProxyType(
            {
                "model_type": "nemotron_h",
                "hidden_size": 2688,
                "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
                "num_key_value_heads": 2,
                "head_dim": 128,
                "mamba_num_heads": 64,
                "mamba_head_dim": 64,
                "ssm_state_size": 128,
                "n_groups": 8,
                "conv_kernel": 4,
            }
        ),
        "qwen3.5-35b-a3b": MappingProxyType({"model_type": "qwen3_5_moe", "text_config": _qwen(40)}),
        "qwen3-next-80b-a3b": MappingProxyType({"model_type": "qwen3_next", **_qwen(48)}),
        "granite-4-h-small": MappingProxyType(
            {
                "model_type": "granitemoehybrid",
                "hidden_size": 4096,
                "layer_types": tuple("attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)),
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "mamba_n_heads": 128,
                "mamba_d_head": 64,
                "mamba_d_state": 128,
                "mamba_n_groups": 1,
                "mamba_d_conv": 4,
            }
        ),
    }
)
"""The fields that matter here of the published config.json files."""

LAYOUT_NAMES = tuple(_PUBLISHED)

_HALF_BY_DEFAULT = frozenset({"granite-4-h-small"})
"""Published without a wish for a float32 state."""


def layout_for(name: str, block_size: int = 16, state_dtype: str | None = None) -> CacheLayout:
    """The layout of a published model or of a config.json. `state_dtype` None: float32, for granite-4-h-small bfloat16.

    Raises ConfigError naming --layout, --state-dtype or --block-size, and the fix.
    """
    if not 1 <= block_size <= 4096:
        raise ConfigError(f"--block-size must be from 1 to 4096, not {block_size}")
    dtype = state_dtype or ("bfloat16" if name in _HALF_BY_DEFAULT else "float32")
    if dtype not in STATE_DTYPES:
        raise ConfigError(f"--state-dtype must be one of {', '.join(STATE_DTYPES)}, not {dtype!r}")
    config = _PUBLISHED.get(name)
    return remembers(_load(name) if config is None else config, name).layout(block_size, STATE_DTYPES[dtype])


def _load(name: str) -> Mapping[str, Any]:
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"--layout {name}: more than {MAX_CONFIG_BYTES} bytes is no config.json")
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        names = ", ".join(LAYOUT_NAMES)
        raise ConfigError(f"--layout {name} is neither {names} nor a config.json that can be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--layout {name} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--layout {name} must hold a JSON object")
    return config


def remembers(config: Mapping[str, Any], name: str) -> Remembers:
    """What the model of `config` remembers. Raises ConfigError naming the field; `name` says where it stands."""
    family = config.get("model_type")
    text = config.get("text_config")
    fields = _Fields(text if isinstance(text, Mapping) else config, name)
    reader = _READERS.get(str(family))
    if reader is None:
        raise ConfigError(f"--layout {name}: model_type {family!r} is not one of {', '.join(_READERS)}")
    return reader(fields)


@dataclass(frozen=True, slots=True)
class _Fields:
    """A config and where it was found."""

    values: Mapping[str, Any]
    where: str

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= MOST:
            raise ConfigError(f"--layout {self.where}: {name} must be a whole number from 1 to {MOST}, not {value!r}")
        return value

    def head_dim(self) -> int:
        if self.values.get("head_dim") is not None:
            return self.whole("head_dim")
        return self.whole("hidden_size") // self.whole("num_attention_heads")

    def kinds(self, *names: str) -> list[str]:
        """The layers' kinds, of the first of the fields `names` that is there: a list of words or a pattern."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, list | tuple | str) and len(value) <= MOST:
                return [str(kind) for kind in value]
        raise ConfigError(f"--layout {self.where}: {names[0]} must list the kinds of the layers")

    def keys_and_values(self, layers: int) -> int:
        if layers < 1:
            raise ConfigError(f"--layout {self.where}: a model without attention is not known to replay")
        return layers * self.whole("num_key_value_heads") * 2 * self.head_dim()


def _nemotron_h(fields: _Fields) -> Remembers:
    kinds = fields.kinds("hybrid_override_pattern", "layers_block_type")
    heads = fields.whole("mamba_num_heads") * fields.whole("mamba_head_dim")
    size = fields.whole("ssm_state_size")
    return Remembers(
        hidden_size=fields.whole("hidden_size"),
        token_numbers=fields.keys_and_values(kinds.count("*") + kinds.count("attention")),
        recurrent_layers=kinds.count("M") + kinds.count("mamba"),
        conv_rows=fields.whole("conv_kernel") - 1,
        conv_channels=heads + 2 * fields.whole("n_groups") * size,
        state_numbers=heads * size,
    )


def _granite(fields: _Fields) -> Remembers:
    kinds = fields.kinds("layer_types")
    heads = fields.whole("mamba_n_heads") * fields.whole("mamba_d_head")
    size = fields.whole("mamba_d_state")
    return Remembers(
        hidden_size=fields.whole("hidden_size"),
        token_numbers=fields.keys_and_values(kinds.count("attention")),
        recurrent_layers=kinds.count("mamba"),
        conv_rows=fields.whole("mamba_d_conv") - 1,
        conv_channels=heads + 2 * fields.whole("mamba_n_groups") * size,
        state_numbers=heads * size,
    )


def _gated_delta_net(fields: _Fields) -> Remembers:
    if fields.values.get("layer_types") is not None:
        kinds = fields.kinds("layer_types")
        attention, layers = kinds.count("full_attention"), len(kinds)
    else:
        layers = fields.whole("num_hidden_layers")
        attention = layers // fields.whole("full_attention_interval", 4)
    keys = fields.whole("linear_num_key_heads") * fields.whole("linear_key_head_dim")
    values = fields.whole("linear_num_value_heads") * fields.whole("linear_value_head_dim")
    return Remembers(
        hidden_size=fields.whole("hidden_size"),
        token_numbers=fields.keys_and_values(attention),
        recurrent_layers=layers - attention,
        conv_rows=fields.whole("linear_conv_kernel_dim") - 1,
        conv_channels=2 * keys + values,
        state_numbers=values * fields.whole("linear_key_head_dim"),
    )


_READERS: Mapping[str, Callable[[_Fields], Remembers]] = MappingProxyType(
    {
        "nemotron_h": _nemotron_h,
        "granitemoehybrid": _granite,
        "qwen3_next": _gated_delta_net,
        "qwen3_5": _gated_delta_net,
        "qwen3_5_text": _gated_delta_net,
        "qwen3_5_moe_text": _gated_delta_net,
        "qwen3_5_moe": _gated_delta_net,
    }
)
