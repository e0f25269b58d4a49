"""Qwen3 executed; see `qwen3_config` for the architecture."""

from cairn.layers.rotary import make_rotary
from cairn.models.contract import TensorLoader
from cairn.models.decoder import Decoder, Layer
from cairn.models.decoder_builder import DecoderBuilder, Execution
from cairn.models.qwen3_config import Qwen3Config

__all__ = ["build"]


def build(config: Qwen3Config, load: TensorLoader, execution: Execution) -> Decoder:
    """The rank of the model with its weights drawn from `load`. Raises ConfigError for a number of ranks that the model
    cannot be cut among, and as `DecoderBuilder` does."""
    rank, size = execution.communicator.rank, execution.communicator.size
    remembered = config.remembered(rank, size)
    share, inner = config.attention.share(rank, size), config.inner(rank, size)
    builder = DecoderBuilder(config.text, load, execution)
    rotary = make_rotary(config.attention.head_dim, config.rope_theta)
    embedding = builder.vocabulary("model.embed_tokens")
    layers: list[Layer] = []
    for index in range(config.num_hidden_layers):
        name = f"model.layers.{index}"
        attention = builder.attention(f"{name}.self_attn", config.attention, share, index, rotary)
        layers.append((builder.norm(f"{name}.input_layernorm"), attention))
        gate, up, down = (f"{name}.mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj"))
        mlp = builder.swiglu((gate, up, down), config.intermediate_size, inner)
        layers.append((builder.norm(f"{name}.post_attention_layernorm"), mlp))
    return builder.decoder(remembered, embedding, layers, builder.norm("model.norm"))
