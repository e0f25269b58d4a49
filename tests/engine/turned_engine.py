"""A core with a real tiny model that a test turns by hand."""

import numpy as np

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig, GenerateOutput
from doubles.engine_requests import generate_request


class Engine:
    """A core of the tiny model, turned by hand; what it samples from is kept by seed and position."""

    def __init__(self, folder, **config) -> None:
        self.logits = {}
        config = {"kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 4, "exact": True} | config
        self.core = build_core(EngineConfig(model=str(folder), **config), observe=self._observe)
        self.outputs: dict[str, list[GenerateOutput]] = {}

    def _observe(self, sample, logits) -> None:
        self.logits[sample.params.seed, sample.position] = logits.clone()

    def submit(self, name, prompt, **fields) -> None:
        fields = {"seed": 1, "ignore_eos": True, "max_tokens": 8} | fields
        keys = np.array(prompt, "<i8").tobytes()
        self.core.submit(generate_request(request_id=name, prompt=keys, **fields))
        self.outputs[name] = []

    def step(self) -> None:
        for output in self.core.step():
            self.outputs[output.request_id].append(output)

    def run(self) -> None:
        for _ in range(500):
            if not self.core.has_work:
                return self.core.idle()
            self.step()
        raise AssertionError("no end in sight")

    def ask(self, prompt, **fields) -> list[GenerateOutput]:
        self.submit("only", prompt, **fields)
        self.run()
        return self.outputs["only"]

    @property
    def state(self):
        return self.core._scheduler.state


def answer(outputs, index=0):
    return [token for output in outputs if output.index == index for token in output.token_ids]
