"""The check of a GPU's kernels at the start, with the CPU's in their place."""

import math

import pytest
import torch

from cairn.engine.kernel_check import NUM_TOKENS, KernelCheck
from cairn.engine.profile_plans import SLOTS, num_profile_pages
from cairn.errors import ConfigError
from cairn.models.registry import open_model
from cairn.runner.plan_check import CheckedRunner, PlanLimits
from cairn.runner.runner import Runner


class Checked:
    """A runner on which the check is carried out. `damage` is applied to the logits of what comes first, the prompt."""

    def __init__(self, folder, damage=lambda logits: logits):
        opened = open_model(folder)
        self.model, self.layout = opened.build(exact=False, backend="reference"), opened.layout(16)
        num_pages = num_profile_pages(self.layout, NUM_TOKENS)
        self.check, self.positions, self._damage = KernelCheck(), [], damage
        limits = PlanLimits(self.layout, num_pages, SLOTS, self.model.vocab_size, aligned=True)
        runner = Runner(self.model, self.layout, num_pages, SLOTS, False, self._observe)
        self.runner = CheckedRunner(runner, limits)

    def _observe(self, sample, logits):
        self.positions.append(sample.position)
        self.check.observe(sample, self._damage(logits) if len(self.positions) == 1 else logits)

    def run(self):
        for plan, masks in self.check.begin(self.layout, self.model.vocab_size, 0):
            self.runner.launch(plan)
            self.runner.sample(plan.step, masks)
            self.runner.collect(plan.step)
        self.check.finish()


def test_right_kernels_pass(tiny_model, caplog):
    checked = Checked(tiny_model)
    with caplog.at_level("INFO"):
        checked.run()
    assert checked.positions == [NUM_TOKENS, NUM_TOKENS]
    assert "correlate by 1.0000" in caplog.text


@pytest.mark.parametrize(
    "damage",
    [lambda logits: logits * math.nan, torch.zeros_like, lambda logits: logits.roll(7)],
    ids=["NaN", "nothing", "others"],
)
def test_wrong_ones_are_refused_with_ways_out(tiny_model, damage):
    with pytest.raises(ConfigError, match=r"compiled wrongly.*TRITON_PTXAS_PATH.*--exact.*--device cpu"):
        Checked(tiny_model, damage).run()


def test_a_rank_that_sees_no_logits_has_nothing_to_say(tiny_model):
    checked = Checked(tiny_model)
    checked.check.begin(checked.layout, checked.model.vocab_size, 0)
    checked.check.finish()


def test_nothing_is_kept_outside_of_it(tiny_model):
    check = KernelCheck()
    check.observe(None, torch.zeros(3))
    check.finish()
