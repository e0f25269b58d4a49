"""The steps before the first one can be carried out, and are as large as any."""

import pytest
import torch

from cairn.cache.placement import placement_for
from cairn.engine.profile_plans import SLOTS, num_profile_pages, profile_plans, warm_up_plans
from cairn.models.registry import open_model
from cairn.runner.plan_check import CheckedRunner, PlanLimits
from cairn.runner.runner import Runner
from tiers import first_of


@pytest.mark.parametrize(
    ("num_tokens", "mode", "num_drafts"),
    first_of(
        [(1, None, 64), (200, "auto", 64), (200, "align", 0)],
        (1, 200),
        ("auto", "all", "align", None),
        (0, 64),
    ),
)
def test_they_can_be_carried_out(tiny_model, mode, num_tokens, num_drafts):
    opened = open_model(tiny_model)
    model, layout = opened.build(exact=False, backend="reference"), opened.layout(16)
    num_pages = num_profile_pages(layout, num_tokens)
    limits = PlanLimits(layout, num_pages, SLOTS, model.vocab_size, aligned=True)
    runner = Runner(model, layout, num_pages, SLOTS, exact=False)
    checked = CheckedRunner(runner, limits)
    placement = None if mode is None else placement_for(mode, 16, False)
    plans = [(plan, {}) for plan in profile_plans(layout, num_tokens, placement, num_drafts)]
    plans += warm_up_plans(layout, num_tokens, placement, model.vocab_size, len(plans), num_drafts)
    for plan, masks in plans:
        checked.launch(plan)
        checked.sample(plan.step, masks)
    assert [plan.step for plan, _ in plans] == [*range(len(plans))]
    assert [len(checked.collect(plan.step).sampled) for plan, _ in plans] == [1, 1, *[0] * (len(plans) - 3), 1]
    assert torch.isfinite(runner._live.hidden[:SLOTS]).all()
    num_verified = [sum(len(row.tokens) for row in plan.verifies) for plan, _ in plans]
    assert max(num_verified) == (min(65, max(6, num_tokens)) if num_drafts else 0)
    assert len(plans[1][0].folds) == 0 and any(plan.folds for plan, _ in plans) is (num_drafts > 0)


@pytest.mark.parametrize(("mode", "stride"), [("auto", 64), ("all", 16), ("align", 192)])
def test_the_largest_step_keeps_what_a_step_may_keep(tiny_model, mode, stride):
    layout = open_model(tiny_model).layout(16)
    largest, mixed = profile_plans(layout, 200, placement_for(mode, 16, False))
    positions = [snapshot.position for snapshot in largest.snapshots]
    assert positions == [*range(stride, 201, stride), *([200] if mode == "auto" else [])]
    assert [snapshot.row for snapshot in mixed.snapshots] == [1] * len(mixed.snapshots)
    # a state between two grid points is another kernel's
    assert (134 in {snapshot.position for snapshot in mixed.snapshots}) == (mode == "auto")
