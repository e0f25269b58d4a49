"""A real core whose answers are scripted: model, states, scheduler and prefix cache are what they always are, and each
drawn token is forced through the door that grammars use."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig
from cairn.engine.core import Core
from cairn.engine.specs import SpecBuilder
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.scheduler.request import Constraint, Spec
from cairn.step import TokenMask

__all__ = ["scripted_core"]


class _Script:
    """One answer, token by token, and nothing else. Implements `scheduler.request.Constraint`. `grammar`: what the
    request itself holds its answer to; where that forbids the next token, the script is not kept."""

    def __init__(self, token_ids: Sequence[int], vocab_size: int, grammar: Constraint | None) -> None:
        self._token_ids = token_ids
        self._vocab_size = vocab_size
        self._grammar = grammar

    def allowed(self, output: Sequence[int]) -> TokenMask | None:
        mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        token = self._token_ids[min(len(output), len(self._token_ids) - 1)]
        mask.view(np.uint32)[token // 32] = 1 << token % 32
        held = None if self._grammar is None else self._grammar.allowed(output)
        return mask if held is None or (held & mask).any() else held


class _ScriptedSpecs(SpecBuilder):
    def __init__(self, builder: SpecBuilder, answer: Callable[[Spec], Sequence[int]], vocab_size: int) -> None:
        self._builder, self._answer, self._size = builder, answer, vocab_size

    def build(self, *arguments: Any, **named: Any) -> list[Spec]:
        specs = self._builder.build(*arguments, **named)
        return [replace(spec, constraint=_Script(self._answer(spec), self._size, spec.constraint)) for spec in specs]


def scripted_core(config: EngineConfig, tokenizer: ModelTokenizer, answer: Callable[[Spec, str], str]) -> Core:
    """`answer(request, prompt as text)` is the text of its answer, behind which the model ends."""
    eos = tokenizer.eos_token_id
    assert eos is not None, "an answer could not end"

    def token_ids(spec: Spec) -> list[int]:
        text = answer(spec, tokenizer.decode(spec.prompt.tolist()))
        return [*tokenizer.encode(text, add_special_tokens=False), eos]

    core = build_core(config)
    core._specs = _ScriptedSpecs(core._specs, token_ids, core.info.vocab_size)
    return core
