"""A plan in the making, and what the scheduler must remember of it until it has been applied."""

from dataclasses import dataclass, field

from cairn.scheduler.request import Request
from cairn.step import Keep, PageCopy, Restore, Row, SampleOnly, Save, StepPlan


@dataclass(slots=True, eq=False)
class Part:
    """One request's share of a step. `end`: tokens computed once it is applied; `kept`: positions of its keeps or
    of its save; `samples`: whether a token comes back; `row`: the index of its row, None without one."""

    request: Request
    end: int
    samples: bool
    row: int | None = None
    kept: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Draft:
    """Collects the records of step `step`; `budget` is what is left of its tokens."""

    step: int
    budget: int
    copies: list[PageCopy] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)
    sample_only: list[SampleOnly] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def add_row(self, request: Request, row: Row) -> None:
        """A row, and the part that goes with it."""
        self.parts.append(Part(request, row.end, row.sample is not None, row=len(self.rows)))
        self.rows.append(row)
        self.budget -= row.end - row.start

    def plan(self) -> StepPlan:
        return StepPlan(
            step=self.step,
            copies=tuple(self.copies),
            restores=tuple(self.restores),
            saves=tuple(self.saves),
            rows=tuple(self.rows),
            keeps=tuple(self.keeps),
            sample_only=tuple(self.sample_only),
        )
