"""What a GGUF file's metadata say, in config.json's words: what all families have."""

from types import MappingProxyType
from typing import Any

import numpy as np

from cairn.models.config_schema import MAX_LAYERS, Fields
from cairn.models.weights.gguf.header import GgufHeader

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
"""Stored names."""

_DTYPES = MappingProxyType({"F32": "float32", "F16": "float16"})
_PLAIN = frozenset(("F32", "F16", "BF16"))
_MOST = 1 << 30


class GgufMetadata:
    """Typed access to the fields of a file's architecture, `model`, and to those of its tokenizer, `tokenizer`."""

    def __init__(self, header: GgufHeader) -> None:
        prefix = f"{header.architecture}."
        file, fields = header.path.name, header.metadata
        of_model = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
        self.tensors = header.tensors
        self.model = Fields(of_model, file, path_of=lambda name: prefix + name)
        self.tokenizer = Fields(fields, file)
        self.num_heads_predicting = self.integer("nextn_predict_layers", 0)
        self.num_layers = self.integer("block_count") - self.num_heads_predicting

    def integer(self, name: str, default: int | None = None) -> int:
        """A number that is not negative. Raises ModelError that names the field."""
        return self.model.integer(name, 0, _MOST, default)

    def number(self, name: str, default: float | None = None) -> float:
        """The shortest decimal number that is stored as this one, as config.json had it. Raises ModelError that names
        the field."""
        return float(str(np.float32(self.model.number(name, -3e38, 3e38, default))))

    def each_layer(self, name: str) -> int:
        """A number that is the same in all layers that have one: it is stored as one, or as one for each layer, 0 where
        there is none. Raises ModelError that names the field."""
        value = self.model.get(name)
        if not isinstance(value, list):
            return self.integer(name)
        sizes = sorted({size for size in value if size})
        if len(sizes) > 1:
            raise self.model.error(f"{self.model.path_of(name)} differs between layers, which is not implemented")
        return int(sizes[0]) if sizes else 0

    def layer_has(self, layer: int, *names: str) -> bool:
        """Whether any such tensor is stored of a layer."""
        return any(f"blk.{layer}.{name}" in self.tensors for name in names)

    def config(self, model_type: str, eps: str = "rms_norm_eps") -> dict[str, Any]:
        """config.json's fields that all families have. `eps`: what that of norms is called there. Raises ModelError
        that names the field."""
        config: dict[str, Any] = {
            "model_type": model_type,
            "dtype": self._dtype(),
            "hidden_size": self.integer("embedding_length"),
            "max_position_embeddings": self.integer("context_length"),
            "num_attention_heads": self.each_layer("attention.head_count"),
            "num_key_value_heads": self.each_layer("attention.head_count_kv"),
            "num_hidden_layers": self.num_layers,
            "tie_word_embeddings": OUTPUT not in self.tensors,
            "eos_token_id": self._ends(),
            eps: self.number("attention.layer_norm_rms_epsilon"),
        }
        if any(tensor.type_name not in _PLAIN for tensor in self.tensors.values()):
            config["quantization_config"] = {"quant_method": "gguf"}
        if EMBEDDING in self.tensors:
            config["vocab_size"] = self.tensors[EMBEDDING].shape[0]
        if self.model.has("attention.key_length"):
            config["head_dim"] = self.integer("attention.key_length")
            self.model.only("attention.value_length", config["head_dim"])
        return config

    def rope(self) -> dict[str, Any]:
        """`rope_parameters`. Raises ModelError that names the field."""
        model = self.model
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.number("rope.freq_base", 10000.0)}
        kind = model.read("rope.scaling.type", str, "a string", "none")
        if kind == "none":
            return rope
        rope |= {"rope_type": kind, "factor": self.number("rope.scaling.factor")}
        if kind == "yarn":
            # ggml multiplies this with what it works out itself, and config.json says the whole.
            model.only("rope.scaling.yarn_attn_factor", 1.0)
            model.only("rope.scaling.yarn_ext_factor", 1.0, -1.0)
            names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
            rope |= {
                name: self.number(f"rope.scaling.{stored}")
                for stored, name in names.items()
                if model.has(f"rope.scaling.{stored}")
            }
            if model.has("rope.scaling.original_context_length"):
                rope["original_max_position_embeddings"] = self.integer("rope.scaling.original_context_length")
        return rope

    def layers(self, *names: str) -> list[int]:
        """The layers that have any such tensor."""
        return [layer for layer in range(min(self.num_layers, MAX_LAYERS)) if self.layer_has(layer, *names)]

    def _dtype(self) -> str:
        """That of most numbers in matrices; what is quantized was bfloat16 before."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                dtype = _DTYPES.get(tensor.type_name, "bfloat16")
                sizes[dtype] = sizes.get(dtype, 0) + int(np.prod(tensor.shape))
        return max(sizes, key=sizes.__getitem__, default="float32")

    def _ends(self) -> list[int]:
        """The tokens that end an answer, or a turn."""
        names = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        return [self.tokenizer.integer(name, 0, _MOST) for name in names if self.tokenizer.has(name)]
