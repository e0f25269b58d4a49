"""What each kind of step copies between host and device, on a device that counts, and the answers of the host.

launch     one copy in, whatever is in the plan; and one for each image that is encoded for it, its pixels
sample     one copy out; and one in where a mask or another token rule is applied: they are made of what the step
           before has drawn, which nobody knows at the launch
collect    none
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cairn.engine.multimodal_keys import ImageKeys
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.runner.runner import Runner
from cairn.runner.vision import open_vision
from cairn.scheduler.request import Spec
from cairn.step import StepPlan
from cairn.types import Boundary, RequestId, SamplingParams
from doubles.counted_device import counted_device
from engine.test_counted_device import Mask, Mixed
from engine.test_exactness import OTHER, TEXT, Loaded, OnDevice
from engine.test_images_served import image

GREEDY = SamplingParams(temperature=0.0)
CACHE_BYTES = 1 << 20

Copies = tuple[int, int]


class Steps(Mixed):
    """An engine with images that writes down what every launch, draw and collection copies. `kinds`: what has been in
    its plans. `told`: see `Mixed`."""

    def __init__(self, loaded: Loaded, folder: Path, device: torch.device | None, **settings: Any) -> None:
        super().__init__(loaded, settings.pop("ahead"))
        self.kinds: Counter[str] = Counter()
        self.vision = open_vision(folder, torch.float32, CACHE_BYTES, device=device)
        self.runner = Runner(loaded.models[False], self.runner.layout, 400, 4, False, vision=self.vision)
        self.pipeline._runner = self.runner
        self.tokenizer = ModelTokenizer(folder)
        self._keys = ImageKeys(self.tokenizer.image_token)
        for name in ("launch", "sample", "collect"):
            setattr(self.runner, name, partial(self._watch, name, getattr(self.runner, name)))

    def _watch(self, name: str, call: Callable[..., Any], first: Any, *others: Any) -> Any:
        encodes, hits = self.vision.counters.encodes, self.vision.counters.hits
        self._take()
        result = call(first, *others)
        copied = self._take()
        if name == "launch":
            encoded = self.vision.counters.encodes - encodes
            self._note(first, encoded, self.vision.counters.hits - hits)
            self.expect(copied, (1 + encoded, 0))
        elif name == "sample":
            (masks,) = others
            self.kinds["constrained"] += bool(masks)
            self.expect(copied, (int(bool(masks)), copied[1]))
            assert copied[1] <= 1, copied
        else:
            self.expect(copied, (0, 0))
        return result

    def start(self) -> None:
        """One step, so that what is asked next comes while something decodes."""
        self.pipeline.launch()

    def expect(self, copied: Copies, expected: Copies) -> None:
        assert self._copies is None or copied == expected

    def _take(self) -> Copies:
        return (0, 0) if self._copies is None else self._copies.take()

    def _note(self, plan: StepPlan, encoded: int, hits: int) -> None:
        found = {
            "prefill": plan.prefills and not len(plan.decodes),
            "decode": len(plan.decodes) and not plan.prefills,
            "mixed": len(plan.decodes) and plan.prefills,
            "hit": plan.restores,
            "save": plan.saves,
            "snapshot": plan.snapshots,
            "copy": plan.copies,
            "image": encoded,
            "image again": hits and not encoded,
            "nothing computed": len(plan.samples) and not plan.num_seqs,
        }
        self.kinds.update(name for name, is_there in found.items() if is_there)

    def ask(self, name: str, tokens: Any, images: Any = (), **fields: Any) -> None:
        keys, found = self._keys.put_in(np.array(tokens, np.int64), images)
        fields = {"sampling": GREEDY, "max_tokens": 3} | fields
        self.scheduler.submit(Spec(request_id=RequestId(name), prompt=keys, images=found, **fields))

    def chat(self, name: str, *parts: Any, **fields: Any) -> None:
        made = self.tokenizer.render_chat([{"role": "user", "content": list(parts)}])
        self.ask(name, made.token_ids, made.images, boundaries=tuple(made.boundaries), **fields)


KINDS = ["prefill", "decode", "mixed", "hit", "save", "snapshot", "copy", "image", "constrained"]


@pytest.fixture(scope="module")
def loaded(made_model):
    return OnDevice(made_model("qwen3_5_vl"))


def answers(loaded: Loaded, folder: Path, device: torch.device | None, ahead: int) -> Steps:
    engine = Steps(loaded, folder, device, ahead=ahead)
    end = Boundary(70, "message_end")
    engine.ask("cold", TEXT[:90], boundaries=(end,))
    engine.run_all()
    engine.ask("hit", (*TEXT[:90], *OTHER[:30]))
    engine.ask("inside a page", (*TEXT[:70], *OTHER[40:60]))
    engine.ask("constrained", OTHER[:40], constraint=Mask())
    engine.run_all()
    engine.chat("image", {"type": "text", "text": "See"}, image(160, 96), image(64, 64, seed=1))
    engine.start()
    engine.ask("beside it", OTHER[100:140])
    engine.run_all()
    engine.ask("the same", TEXT[:90])
    engine.chat("other text", {"type": "text", "text": "Look"}, image(160, 96), image(64, 64, seed=1))
    engine.run_all()
    return engine


@pytest.mark.parametrize("ahead", [1, 2])
def test_every_kind_of_step_has_one_copy_in_and_one_out(loaded, tiny_vl_model, ahead):
    device, _ = counted_device()
    found, wanted = (
        answers(*each, ahead) for each in ((loaded, tiny_vl_model, device), (loaded._host, tiny_vl_model, None))
    )
    assert found.told == wanted.told and len(found.told) == 8
    assert found.kinds == wanted.kinds and {*KINDS, "image again"} <= {*found.kinds}
    kept = [*found.vision._cache.values()]
    assert {vectors.device.type for vectors in kept} == {device.type}
    assert found.vision.counters.cached_bytes == sum(vectors.nbytes for vectors in kept) > 0
    assert found.vision.counters.encodes == 2 and found.vision.counters.hits > 0
