"""What a head of multi-token prediction drafts, against transformers' layers in float64.

transformers does not read such heads, but their layer is one of the model's: so the reference is a model of that layer
alone, whose embeddings are what the published projection makes of embedding and hidden state.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.nemotron_h import modeling_nemotron_h

from cairn.runner.runner import Runner
from cairn.runner.vision import mrope_positions
from cairn.step import DRAFTED, Image, StepPlan, VerifyRow
from models.nemotron_h_truth import published
from models.qwen3_5_truth import CLASSES, parse_qwen, published_qwen, qwen_weights, raw_qwen
from models.test_qwen3_5_logits import GivenVectors, images_of
from models.wide_float import wide_float
from runner.harness import Driver, build_tiny, parse, prompt, random_weights, ranks, raw_config
from tiers import first, more

LENGTH = 70
DRAFTS = 3


class Truth:
    """`hidden`: after the final norm, of each token; `embed`: [tokens, hidden]; `outputs`: of the head's layer, which
    gets [entries, hidden] at positions [entries]; `names`: of both norms and the projection."""

    def __init__(self, weights: Mapping[str, Tensor], names: tuple[str, str, str], centred: bool, eps: float) -> None:
        self.embedding_norm, self.hidden_norm, self.projection = (weights[f"{name}.weight"].double() for name in names)
        self.centred, self.eps = centred, eps

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        scaled = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return scaled * (weight + 1 if self.centred else weight)

    def logits(self, tokens: list[int], num_drafts: int, drafts: list[int]) -> Tensor:
        """Of each of the drafts after `tokens`, [num_drafts, vocab]: of the first the last token's own hidden state is
        not known yet. `drafts`: those that were made."""
        known = self.hidden(tokens[:-1])
        before = torch.cat([torch.zeros_like(known[:1]), known])
        found = []
        for number in range(num_drafts):
            embeddings = self.embed(tokens + drafts[:number])
            both = [self.norm(embeddings, self.embedding_norm), self.norm(before, self.hidden_norm)]
            entries = torch.cat(both, dim=-1) @ self.projection.T
            outputs, logits = self.outputs(entries, torch.arange(len(entries)) - 1)
            before = torch.cat([before, outputs[-1:]])
            found.append(logits[-1])
        return torch.stack(found)


class QwenTruth(Truth):
    def __init__(self, raw: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        names = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc"
        super().__init__(weights, names, True, 1e-6)
        kind = raw["model_type"]
        self.module = CLASSES[kind][2]
        self.model = published_qwen(raw, {name: w for name, w in weights.items() if not name.startswith("mtp.")})
        layer = raw | {"layer_types": ["full_attention"], "num_hidden_layers": 1, "mlp_only_layers": []}
        own = {f"model.{name[4:]}": w for name, w in weights.items() if name.startswith(("mtp.layers.", "mtp.norm."))}
        shared = {name: weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
        self.head = published_qwen(layer, own | shared).double()
        self.model = self.model.double()
        self.positions: Tensor | None = None
        self.vectors: Mapping[int, Tensor] = {}

    def show(self, positions: Tensor, vectors: Mapping[int, Tensor]) -> None:
        """Images: where all tokens stand, [3, n], and what stands for some of them."""
        self.positions, self.vectors = positions, vectors

    def embed(self, tokens: list[int]) -> Tensor:
        embedded: Tensor = self.model.get_input_embeddings()(torch.tensor(tokens).clamp(min=0))
        for place, vectors in self.vectors.items():
            embedded[place : place + len(vectors)] = vectors
        return embedded

    def hidden(self, tokens: list[int]) -> Tensor:
        return self._run(self.model, self.embed(tokens), self.places(len(tokens)))

    def places(self, length: int) -> Tensor:
        text = torch.arange(length).expand(3, -1)
        return text if self.positions is None else self.positions[:, :length]

    def _run(self, model: Any, embeddings: Tensor, positions: Tensor) -> Tensor:
        with wide_float(self.module):
            if self.module is not CLASSES["qwen3_next"][2]:
                places = torch.cat([torch.arange(len(embeddings))[None], positions])[:, None]
            else:
                places = positions[:1]
            given = {"inputs_embeds": embeddings[None], "position_ids": places, "use_cache": False}
            hidden: Tensor = model.model(**given).last_hidden_state[0]
        return hidden

    def outputs(self, entries: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of an entry the position is that of the token before it."""
        before = torch.cat([torch.full((3, 1), -1), self.places(len(entries) - 1)], dim=1)
        hidden = self._run(self.head, entries, before)
        return hidden, hidden @ self.head.lm_head.weight.T


class NemotronTruth(Truth):
    def __init__(self, raw: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        names = "mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.0.eh_proj"
        super().__init__(weights, names, False, 1e-5)
        raw = {name: value for name, value in raw.items() if "mtp" not in name and "nextn" not in name}
        others = {name: w for name, w in weights.items() if not name.startswith("mtp.")}
        self.model = published(raw, others, clamp=False).double()
        left_out = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")
        own = {name.replace("mtp.", "backbone."): w for name, w in weights.items() if name.startswith("mtp.")}
        own = {name: w for name, w in own.items() if not name.endswith(left_out)}
        own["backbone.norm_f.weight"] = weights["mtp.layers.1.final_layernorm.weight"]
        shared = {name: weights[name] for name in ("backbone.embeddings.weight", "lm_head.weight")}
        layers = raw | {"hybrid_override_pattern": "*E", "num_hidden_layers": 2}
        self.head = published(layers, own | shared, clamp=False).double()

    def embed(self, tokens: list[int]) -> Tensor:
        return self.model.get_input_embeddings()(torch.tensor(tokens))

    def hidden(self, tokens: list[int]) -> Tensor:
        with wide_float(modeling_nemotron_h):
            return self.model.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]

    def outputs(self, entries: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        with wide_float(modeling_nemotron_h):
            hidden = self.head.model(inputs_embeds=entries[None], use_cache=False).last_hidden_state[0]
        return hidden, hidden @ self.head.lm_head.weight.T


def made(name: str) -> tuple[Any, dict[str, Tensor], Truth]:
    if name == "nemotron_h":
        raw = raw_config("ME*M-*", num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E")
        config = parse(raw).asking(serves_mtp=True)
        weights = random_weights(config, 5)
        return config, weights, NemotronTruth(raw, weights)
    raw = raw_qwen(name)
    config = parse_qwen(raw).asking(serves_mtp=True)
    weights = qwen_weights(config, 5)
    weights |= {key: 0.3 * torch.randn(w.shape) for key, w in weights.items() if "pre_fc_norm" in key}
    return config, weights, QwenTruth(raw, weights)


def drafted(driver: Driver, tokens: list[int], cuts: list[int], images: tuple[Image, ...] = ()) -> list[Tensor]:
    """The head's own logits of each of its drafts after `tokens`, all but the last of which are computed in rows; of
    several ranks rank 0's."""
    seen, sequence, begin = list[Tensor](), driver.sequence(0, LENGTH + DRAFTS), 0
    for end in cuts:
        row = driver.row(sequence, tokens[begin:end], sample=False, decode=end - begin == 1)
        driver.run(replace(row, images=images))
        begin = end
    assert begin == len(tokens) - 1
    for runner in getattr(driver.runner, "runners", (driver.runner,)):
        see_logits(runner, seen if runner.rank == 0 else [])
    row = VerifyRow(0, begin, np.array([tokens[-1]] + DRAFTS * [DRAFTED]), 0)
    driver.step += 1
    driver.checked.run(StepPlan(driver.step, verifies=(row,)))
    return seen


def see_logits(runner: Runner, seen: list[Tensor]) -> None:
    """Of each draft that the head makes from now on. All ranks take part."""
    head = runner._head
    assert head is not None
    advance = head.advance

    def see(rows: Any, depth: int) -> None:
        advance(rows, depth)
        seen.append(runner._model.logits(head.hidden[:1])[0])
        assert head.tokens[0] == seen[-1].argmax()

    head.advance = see  # type: ignore[method-assign]


def check(truth: Truth, tokens: list[int], seen: list[Tensor]) -> Tensor:
    drafts = [int(each.argmax()) for each in seen]
    with torch.inference_mode():
        wanted = truth.logits(tokens, DRAFTS, drafts)
    found = torch.stack(seen).double()
    assert wanted.std() > 0.1
    assert ((found - wanted).abs().amax(-1) / wanted.std() < 1e-4).all()
    return wanted


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "cpu"])
@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5_text", more("qwen3_5_moe_text"), more("qwen3_next")])
def test_drafts_are_those_of_the_published_head(name: str, exact: bool) -> None:
    """Over a prompt in two chunks and a decode, and along the chain of its drafts."""
    torch.manual_seed(1)
    config, weights, truth = made(name)
    driver = Driver(config, build_tiny(config, weights, exact), exact)
    tokens = prompt(LENGTH, 3)
    check(truth, tokens, drafted(driver, tokens, [64, LENGTH - 2, LENGTH - 1]))


SEVERAL = [("nemotron_h", 2), ("nemotron_h", 4), ("qwen3_5_text", 2), ("qwen3_5_moe_text", 2), ("qwen3_next", 4)]


@pytest.mark.parametrize(("name", "size"), first(1, SEVERAL))
def test_several_ranks_draft_what_the_published_head_does(name: str, size: int) -> None:
    torch.manual_seed(1)
    config, weights, truth = made(name)
    several = ranks(config, weights, size, exact=True)
    tokens = prompt(LENGTH, 3)
    check(truth, tokens, drafted(several, tokens, [64, LENGTH - 2, LENGTH - 1]))
    several.runner.close()


@pytest.mark.parametrize("cuts", [[69], [12, 25, 69], more([20, 37, 50, 69])])
def test_an_image_stands_in_three_dimensions(cuts: list[int]) -> None:
    """Its vectors are its tokens' embeddings, and the entry of each has the position of the token before it."""
    torch.manual_seed(1)
    config, weights, truth = made("qwen3_5_text")
    assert isinstance(truth, QwenTruth)
    images = images_of((10, 3, 5), (30, 8, 2))
    vectors = {image.start: torch.randn(image.length, 32) for image in images}
    tokens = prompt(LENGTH, 3)
    for image in images:
        tokens[image.start : image.end] = [-1] * image.length
    text = truth.logits([max(0, token) for token in tokens], DRAFTS, [0, 0, 0])
    truth.show(torch.from_numpy(mrope_positions(0, LENGTH + DRAFTS, images, 2)), vectors)
    driver = Driver(config, build_tiny(config, weights, False), False, vision=GivenVectors(vectors))
    wanted = check(truth, tokens, drafted(driver, tokens, cuts, images))
    assert (wanted[0] - text[0]).abs().max() > 0.1 * wanted.std()
