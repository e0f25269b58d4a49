"""From a config.json's fields to `ModelSizes`, for the families in `FAMILIES`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cairn.errors import ConfigError
from cairn.replay.config_fields import ConfigFields
from cairn.replay.model_sizes import ModelSizes, Recurrent

__all__ = ["FAMILIES", "model_sizes"]


@dataclass(frozen=True, slots=True)
class _Attention:
    hidden: int
    queries: int
    keys: int

    @property
    def weights(self) -> int:
        """Of the projections to queries, keys, values and back."""
        return self.hidden * (2 * self.queries + 2 * self.keys)


@dataclass(frozen=True, slots=True)
class _Mamba2:
    """`inner`: heads times their size; `groups`: how many have a B and C of their own, of `size` elements each."""

    hidden: int
    heads: int
    inner: int
    groups: int
    size: int
    kernel: int

    @property
    def weights(self) -> int:
        """Of the projections to gate, x, B, C and time steps, and back."""
        return self.hidden * (3 * self.inner + 2 * self.groups * self.size + self.heads)

    def remembers(self, layers: int) -> Recurrent | None:
        channels = self.inner + 2 * self.groups * self.size
        return Recurrent(layers, self.kernel - 1, channels, self.inner * self.size) if layers else None


def model_sizes(config: Mapping[str, object], where: str) -> ModelSizes:
    """The sizes of the model of `config`. Raises ConfigError naming the field; `where` says what --layout named."""
    family = config.get("model_type")
    text = config.get("text_config")
    reader = FAMILIES.get(family) if isinstance(family, str) else None
    if reader is None:
        raise ConfigError(f"--layout {where}: model_type {family!r} is not one of {', '.join(FAMILIES)}")
    return reader(ConfigFields(text if isinstance(text, Mapping) else config, where))


def _attention(fields: ConfigFields, head_dim: int | None = None) -> _Attention:
    """`head_dim`: where config.json has none; None stands for an equal part of the hidden size."""
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if head_dim is None and not fields.has("head_dim"):
        head_dim = max(1, hidden // heads)
    head_dim = fields.whole("head_dim", head_dim)
    return _Attention(hidden, heads * head_dim, fields.whole("num_key_value_heads", heads) * head_dim)


def _mamba2(fields: ConfigFields, inner: int | None = None) -> _Mamba2:
    """As Granite and Falcon-H1 call its fields. `inner`: `mamba_expand` times the hidden size unless given."""
    hidden = fields.whole("hidden_size")
    return _Mamba2(
        hidden=hidden,
        heads=fields.whole("mamba_n_heads", 128),
        inner=inner or fields.whole("mamba_expand", 2) * hidden,
        groups=fields.whole("mamba_n_groups", 1),
        size=fields.whole("mamba_d_state", 256),
        kernel=fields.whole("mamba_d_conv", 4),
    )


_NEMOTRON_H = MappingProxyType(
    {"M": "M", "*": "*", "-": "-", "E": "E", "mamba": "M", "linear_attention": "M"}
    | {"attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
)


def _nemotron_h(fields: ConfigFields) -> ModelSizes:
    names = ("hybrid_override_pattern", "layers_block_type", "layer_types")
    kinds = fields.kinds(_NEMOTRON_H, *names)
    if kinds is None:
        raise fields.wrong(names[0], "a list of the layers' kinds")
    hidden, weights = fields.whole("hidden_size"), 0
    attention = recurrent = None
    if count := kinds.count("*"):
        attention = _attention(fields, fields.whole("attention_head_dim") if fields.has("attention_head_dim") else None)
        weights += count * attention.weights
    if count := kinds.count("M"):
        heads = fields.whole("mamba_num_heads")
        mamba2 = _Mamba2(
            hidden=hidden,
            heads=heads,
            inner=heads * fields.whole("mamba_head_dim"),
            groups=fields.whole("n_groups"),
            size=fields.whole("ssm_state_size"),
            kernel=fields.whole("conv_kernel"),
        )
        weights += count * mamba2.weights
        recurrent = mamba2.remembers(count)
    if count := kinds.count("-"):
        weights += count * 2 * hidden * fields.whole("intermediate_size")
    if count := kinds.count("E"):
        weights += count * _squared_relu_experts(fields, hidden)
    return _sizes(hidden, attention, kinds.count("*"), weights, recurrent)


def _squared_relu_experts(fields: ConfigFields, hidden: int) -> int:
    latent = fields.whole("moe_latent_size") if fields.has("moe_latent_size") else None
    expert = 2 * (latent or hidden) * fields.whole("moe_intermediate_size")
    weights = fields.whole("n_routed_experts") * hidden + fields.whole("num_experts_per_tok") * expert
    weights += 2 * hidden * fields.whole("moe_shared_expert_intermediate_size")
    return weights + (2 * hidden * latent if latent else 0)


_GRANITE = MappingProxyType(
    {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}
)


def _granite(fields: ConfigFields) -> ModelSizes:
    kinds = fields.kinds(_GRANITE, "layer_types", "layers_block_type") or ("mamba",) * fields.layers()
    attention, mamba2 = _attention(fields), _mamba2(fields)
    hidden = attention.hidden
    experts = fields.whole("num_local_experts", 8, low=0)
    behind = 3 * hidden * fields.whole("shared_intermediate_size", 1024)
    if experts:
        behind += experts * hidden
        behind += fields.whole("num_experts_per_tok", 2) * 3 * hidden * fields.whole("intermediate_size")
    weights = kinds.count("attention") * attention.weights + kinds.count("mamba") * mamba2.weights
    weights += len(kinds) * behind
    return _sizes(hidden, attention, kinds.count("attention"), weights, mamba2.remembers(kinds.count("mamba")))


def _falcon_h1(fields: ConfigFields) -> ModelSizes:
    layers, attention = fields.layers(), _attention(fields)
    mamba2 = _mamba2(fields, fields.whole("mamba_d_ssm") if fields.has("mamba_d_ssm") else None)
    mlp = 3 * attention.hidden * fields.whole("intermediate_size")
    weights = layers * (attention.weights + mamba2.weights + mlp)
    return _sizes(attention.hidden, attention, layers, weights, mamba2.remembers(layers))


def _lfm2(fields: ConfigFields) -> ModelSizes:
    kinds = fields.kinds({"conv": "conv", "full_attention": "full_attention"}, "layer_types")
    if kinds is None:
        count = fields.layers()
        full = fields.indices("full_attn_idxs", count) if fields.has("full_attn_idxs") else set(range(count))
        kinds = tuple("full_attention" if index in full else "conv" for index in range(count))
    attention, convs = _attention(fields), kinds.count("conv")
    hidden = attention.hidden
    weights = (len(kinds) - convs) * attention.weights + convs * 4 * hidden * hidden
    weights += len(kinds) * 3 * hidden * _lfm2_inner(fields)
    recurrent = Recurrent(convs, fields.whole("conv_L_cache", 3) - 1, hidden, 0) if convs else None
    return _sizes(hidden, attention, len(kinds) - convs, weights, recurrent)


def _lfm2_inner(fields: ConfigFields) -> int:
    """Two thirds of what is given, unless that is said to be final already."""
    size = fields.whole("block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size", 12288)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.whole("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return multiple * -(-size // multiple)


def _qwen3(fields: ConfigFields) -> ModelSizes:
    layers, attention = fields.layers(), _attention(fields, head_dim=128)
    weights = layers * (attention.weights + 3 * attention.hidden * fields.whole("intermediate_size"))
    return _sizes(attention.hidden, attention, layers, weights, None)


def _gated_delta_net(fields: ConfigFields, experts: bool) -> ModelSizes:
    words = {"linear_attention": "delta", "full_attention": "full"}
    kinds = fields.kinds(words, "layer_types")
    if kinds is None:
        interval = fields.whole("full_attention_interval", 4)
        kinds = tuple("delta" if (index + 1) % interval else "full" for index in range(fields.layers()))
    hidden, full, delta = fields.whole("hidden_size"), kinds.count("full"), kinds.count("delta")
    attention = recurrent = None
    weights = 0
    if full:
        attention = _attention(fields, head_dim=256)
        # queries come with a gate
        weights += full * (attention.weights + hidden * attention.queries)
    if delta:
        keys = fields.whole("linear_num_key_heads") * fields.whole("linear_key_head_dim")
        heads = fields.whole("linear_num_value_heads")
        values = heads * fields.whole("linear_value_head_dim")
        # to q, k, v, the gate and two numbers a head, and back
        weights += delta * hidden * (2 * keys + 3 * values + 2 * heads)
        rows = fields.whole("linear_conv_kernel_dim", 4) - 1
        recurrent = Recurrent(delta, rows, 2 * keys + values, values * fields.whole("linear_key_head_dim"))
    weights += _qwen_feed_forward(fields, hidden, len(kinds), experts)
    return _sizes(hidden, attention, full, weights, recurrent)


def _qwen_feed_forward(fields: ConfigFields, hidden: int, layers: int, experts: bool) -> int:
    """Of all layers; the shared expert has a gate of its own."""
    sparse, weights = 0, 0
    if experts:
        step, dense = fields.whole("decoder_sparse_step", 1), fields.indices("mlp_only_layers", layers)
        sparse = sum(index not in dense and (index + 1) % step == 0 for index in range(layers))
    if sparse:
        inner = fields.whole("num_experts_per_tok") * fields.whole("moe_intermediate_size")
        inner += fields.whole("shared_expert_intermediate_size")
        weights = sparse * hidden * (fields.whole("num_experts") + 3 * inner + 1)
    if sparse < layers:
        weights += (layers - sparse) * 3 * hidden * fields.whole("intermediate_size")
    return weights


def _sizes(
    hidden: int, attention: _Attention | None, layers: int, weights: int, recurrent: Recurrent | None
) -> ModelSizes:
    if attention is None or not layers:
        return ModelSizes(hidden, 0, 0, weights, recurrent)
    return ModelSizes(hidden, layers * 2 * attention.keys, layers * attention.queries, weights, recurrent)


def _dense_delta_net(fields: ConfigFields) -> ModelSizes:
    return _gated_delta_net(fields, experts=False)


def _sparse_delta_net(fields: ConfigFields) -> ModelSizes:
    return _gated_delta_net(fields, experts=True)


FAMILIES: Mapping[str, Callable[[ConfigFields], ModelSizes]] = MappingProxyType(
    {
        "nemotron_h": _nemotron_h,
        "granitemoehybrid": _granite,
        "falcon_h1": _falcon_h1,
        "lfm2": _lfm2,
        "qwen3": _qwen3,
        "qwen3_5": _dense_delta_net,
        "qwen3_5_text": _dense_delta_net,
        "qwen3_5_moe": _sparse_delta_net,
        "qwen3_5_moe_text": _sparse_delta_net,
        "qwen3_next": _sparse_delta_net,
    }
)
"""By model_type."""
