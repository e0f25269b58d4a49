"""LFM2 executed; see `lfm2_config` for the architecture."""

from cairn.layers.blend import Mixer
from cairn.layers.rotary import make_rotary
from cairn.layers.short_conv import ShortConv
from cairn.models.contract import TensorLoader
from cairn.models.cut import Share
from cairn.models.decoder import Decoder, Layer
from cairn.models.decoder_builder import DecoderBuilder, Execution
from cairn.models.lfm2_config import CONV, Lfm2Config
from cairn.models.rank_weights import RankWeights

__all__ = ["build"]


def build(config: Lfm2Config, load: TensorLoader, execution: Execution) -> Decoder:
    """The rank of the model with its weights drawn from `load`. Raises ConfigError for a number of ranks that the model
    cannot be cut among, and as `DecoderBuilder` does."""
    rank, size = execution.communicator.rank, execution.communicator.size
    remembered = config.remembered(rank, size)
    heads, channels = config.attention.share(rank, size), config.conv_share(rank, size)
    builder = DecoderBuilder(config.text, load, execution)
    rotary = make_rotary(config.attention.head_dim, config.rope_theta)
    embedding = builder.vocabulary("model.embed_tokens")
    layers: list[Layer] = []
    for index, kind in enumerate(config.pattern):
        name, number = f"model.layers.{index}", config.pattern[:index].count(kind)
        mixer: Mixer
        if kind == CONV:
            mixer = _short_conv(f"{name}.conv", config, builder.weights, channels, number)
        else:
            mixer = builder.attention(f"{name}.self_attn", config.attention, heads, number, rotary)
        layers.append((builder.norm(f"{name}.operator_norm"), mixer))
        gate, up, down = (f"{name}.feed_forward.{part}" for part in ("w1", "w3", "w2"))
        mlp = builder.swiglu((gate, up, down), config.intermediate_size, config.inner(rank, size))
        layers.append((builder.norm(f"{name}.ffn_norm"), mlp))
    return builder.decoder(remembered, embedding, layers, builder.norm("model.embedding_norm"))


def _short_conv(name: str, config: Lfm2Config, weights: RankWeights, share: Share, layer: int) -> ShortConv:
    hidden, width, bias = config.text.hidden_size, config.unit_channels, config.conv_bias
    held = share.held(width)
    taps = weights.tensor(f"{name}.conv.weight", (hidden, 1, config.conv_taps), held)
    return ShortConv(
        kernels=weights.kernels,
        in_proj=weights.column_parallel(
            f"{name}.in_proj",
            (3 * hidden, hidden),
            *(share.held(width, part * hidden) for part in range(3)),
            bias=bias,
        ),
        conv=taps[:, 0].t().float().contiguous(),
        conv_bias=weights.tensor(f"{name}.conv.bias", (hidden,), held).float() if bias else None,
        out_proj=weights.row_parallel(f"{name}.out_proj", (hidden, hidden), held, bias),
        layer=layer,
    )
