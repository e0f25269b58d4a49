"""Windows, chunks, sinks and softcaps as transformers has them, and how a model gets them from its layers as data."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, chunked_overlay, sliding_window_overlay
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from cairn.kernels import reference
from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.layers.attention import Attention
from cairn.models.attention import AttentionLayer
from cairn.models.decoder_builder import Execution, build_decoder
from cairn.models.layer_sizes import LimitedScores
from doubles.thread_ranks import thread_ranks
from kernels.fixed_calls import paged_call
from kernels.random_batches import RandomBatch, SequenceRows
from models.decoder_families import Tiny, logits_of, prompt, published, tiny
from models.logits_bar import Truth
from models.tiny_configs import qwen3
from runner.harness import left_of

LENGTH = 40


def mask_of(overlay: Callable[..., Any]) -> Tensor:
    """Additive [1, 1, queries, keys]."""
    seen = [
        [overlay(0, 0, q, torch.tensor(k)) and causal_mask_function(0, 0, q, k) for k in range(LENGTH)]
        for q in range(LENGTH)
    ]
    return torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill_(~torch.tensor(seen), -torch.inf)


@pytest.mark.parametrize(
    ("modeling", "overlay", "rule"),
    [
        (modeling_gpt_oss, sliding_window_overlay(7), AttentionRule(window=7, scale=0.3)),
        (modeling_gemma2, sliding_window_overlay(7), AttentionRule(window=7, softcap=1.5, scale=0.3)),
        (modeling_gemma2, chunked_overlay(7, torch.tensor([0])), AttentionRule(chunk=7, scale=0.3)),
    ],
    ids=["gpt-oss", "Gemma 2", "chunks"],
)
def test_the_reference_is_what_transformers_computes(
    modeling: Any, overlay: Callable[..., Any], rule: AttentionRule
) -> None:
    batch = RandomBatch((), (SequenceRows(2, 0, LENGTH),), seed=3)
    call = paged_call("attention", batch, (4, 2, 8), 16, torch.float32, rule=rule, sinks=modeling is modeling_gpt_oss)
    call = call.in_float64()
    (found,) = call.run(reference)
    q, keys, values = (call.operands[name] for name in ("q", "keys", "values"))
    pages = call.block_tables[0][2, : -(-LENGTH // 16)].long()
    k, v = (part[pages].transpose(0, 1).flatten(1, 2)[None, :, :LENGTH] for part in (keys, values))
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=call.operands.get("sinks"))
    options = {"scaling": 0.3, "softcap": rule.softcap}
    wanted, _ = modeling.eager_attention_forward(module, q.transpose(0, 1)[None], k, v, mask_of(overlay), **options)
    # Gemma's softmax is float32's.
    torch.testing.assert_close(found, wanted[0], rtol=0, atol=1e-6)


WINDOW = AttentionRule(window=7)


def with_layers(model: Tiny, **changes: Any) -> Any:
    """The model's spec with every attention layer changed."""
    spec = model.family.spec(model.config)
    layers = tuple(
        (norm, replace(mixer, **changes) if isinstance(mixer, AttentionLayer) else mixer) for norm, mixer in spec.layers
    )
    return replace(spec, layers=layers)


@pytest.mark.parametrize("exact", [False, True])
def test_a_model_with_windows_has_transformers_logits(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny(qwen3(), seed=4)
    layers = plain.raw["num_hidden_layers"]
    windows = {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention"] * layers}
    theirs, tokens = published(replace(plain, raw={**plain.raw, **windows})), prompt(60, 1)
    truth = Truth.of(tokens, *(logits_of(theirs, tokens, wide=wide) for wide in (False, True)))
    model = build_decoder(with_layers(plain, rule=WINDOW), plain.load, Execution(exact, torch.float32))
    monkeypatch.setattr(Tiny, "model", lambda *_: model)
    driver = plain.driver(exact)
    sequence = driver.sequence(0, 60)
    for end in (1, 7, 8, 50):
        (logits,) = driver.run(driver.row(sequence, tokens[sequence.position : end]))
        truth.check(logits, end)
    for end in range(51, 61):
        (logits,) = driver.run(driver.row(sequence, tokens[end - 1 : end], decode=True))
        truth.check(logits, end)


def test_flops_are_counted_within_the_reach() -> None:
    spec = with_layers(tiny(qwen3()), rule=WINDOW)
    first, *others = spec.layers
    plain = (first[0], replace(first[1], rule=FULL))
    mixed = replace(spec, layers=(plain, *others)).forward_sizes()
    numbers = 4 * 16
    windows = sum(1 for _, mixer in others if isinstance(mixer, AttentionLayer))
    assert mixed.score_numbers == numbers
    assert mixed.limited_scores == (LimitedScores(windows * numbers, window=7),)
    attended = sum(numbers * (p + 1) + windows * numbers * min(p + 1, 7) for p in range(10, 30))
    assert mixed.forward_flops(10, 30) == 2 * mixed.active_weights * 20 + 4 * attended


def test_each_rank_has_the_sinks_of_its_query_heads() -> None:
    model = tiny(qwen3())
    sinks = {f"model.layers.{i}.self_attn.sinks": torch.arange(4.0) + 10 * i for i in range(3)}

    def load(name: str, shape: tuple[int, ...], shard: Any = None) -> Tensor:
        if name not in sinks:
            return model.load(name, shape, shard)
        assert shape == (4,)
        return left_of(sinks[name], shard).bfloat16()

    spec = with_layers(model, rule=WINDOW, sinks="sinks")
    assert set(sinks) <= {tensor.name for weight in spec.weights(0, 1) for tensor in weight.tensors}
    for communicator in thread_ranks(2):
        built = build_decoder(spec, load, Execution(True, torch.float32, communicator))
        layers = [mixer for _, mixer in built.layers if isinstance(mixer, Attention)]
        assert [layer.rule for layer in layers] == [WINDOW] * 3
        first = 2 * communicator.rank
        for layer, whole in zip(layers, sinks.values(), strict=True):
            assert layer.sinks is not None and layer.sinks.dtype == torch.float32
            assert layer.sinks.tolist() == whole[first : first + 2].tolist()
