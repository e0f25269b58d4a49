"""The check of a GPU's kernels at the start, with the CPU's in their place."""

import math

import pytest
import torch

from cairn.engine.kernel_check import NUM_TOKENS, NUM_VERIFIED, KernelCheck
from cairn.engine.profile_plans import SLOTS, num_profile_pages
from cairn.errors import ConfigError
from cairn.models.registry import open_model
from cairn.runner.plan_check import CheckedRunner, PlanLimits
from cairn.runner.runner import Runner


class Checked:
    """A runner on which the check is carried out. `damage` is applied to the logits of what comes first, the prompt, or
    to those of number `damaged` of all that are drawn."""

    def __init__(self, folder, damage=lambda logits: logits, damaged=1):
        opened = open_model(folder)
        self.model, self.layout = opened.build(exact=False, backend="reference"), opened.layout(16)
        num_pages = num_profile_pages(self.layout, NUM_TOKENS)
        self.check, self.positions, self._damage, self._damaged = KernelCheck(), [], damage, damaged
        limits = PlanLimits(self.layout, num_pages, SLOTS, self.model.vocab_size, aligned=True)
        runner = Runner(self.model, self.layout, num_pages, SLOTS, False, self._observe)
        self.runner = CheckedRunner(runner, limits)

    def _observe(self, sample, logits):
        self.positions.append(sample.position)
        self.check.observe(sample, self._damage(logits) if len(self.positions) == self._damaged else logits)

    def run(self, drafts=False):
        for plan, masks in self.check.begin(self.layout, self.model.vocab_size, 0, drafts):
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


def test_drafts_are_verified_and_folded_where_there_are_any(tiny_model, caplog):
    checked = Checked(tiny_model)
    with caplog.at_level("INFO"):
        checked.run(drafts=True)
    verified = [*range(NUM_TOKENS - NUM_VERIFIED + 1, NUM_TOKENS + 1)]
    assert checked.positions == [NUM_TOKENS, NUM_TOKENS, *verified, NUM_TOKENS]
    assert caplog.text.count("correlate by 1.0000") == 3


@pytest.mark.parametrize(
    ("damaged", "name"), [(2 + NUM_VERIFIED, "verified drafts"), (3 + NUM_VERIFIED, "folded drafts")]
)
def test_wrong_kernels_of_drafts_are_refused(tiny_model, damaged, name):
    with pytest.raises(ConfigError, match=f"^--device cuda: {name} and token by token"):
        Checked(tiny_model, lambda logits: logits.roll(7), damaged).run(drafts=True)


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
