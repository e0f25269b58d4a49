"""An agent at work: twenty requests that each go on from the one before, and eight that branch from one history.

Run on the real engine with a tiny checkpoint, and with a runner of tags; under templates that drop earlier reasoning.
"""

import json
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from chat_templates import TEMPLATES, TOOLS, agent_messages, tokenizer_with

from cairn.cache.eviction import ValuePerByte
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.cache.placement import placement_for
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.engine.build import build_core
from cairn.engine.contract import Breakpoint, CacheInfo, CacheReport, EngineConfig, EngineInfo
from cairn.engine.core import Core
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.state import SchedulerConfig
from cairn.types import ManualClock
from doubles.engine_requests import generate_request
from doubles.simulated_runner import SimulatedRunner
from tiers import first, more

LAYOUT = CacheLayout(16, 64, 1, (AttentionGroup("full", 16),), 8, 180, 1)
MAX_LEN = 1 << 16


def simulated(tokenizer: ModelTokenizer, mode: str | None = "auto", num_pages: int = 20_000) -> Core:
    placement = None if mode is None else placement_for(mode, 16, False)
    clock = ManualClock()
    cache = PrefixCache(LAYOUT, num_pages, CachePolicy(placement, ValuePerByte()), clock=clock)
    info = EngineInfo(
        model="m",
        architecture="simulated",
        dtype="float32",
        vocab_size=tokenizer.vocab_size,
        max_model_len=MAX_LEN,
        max_num_seqs=8,
        exact=False,
        cache=CacheInfo(
            block_size=16,
            num_pages=num_pages,
            page_bytes=64,
            bytes_per_token=4,
            checkpoint_bytes=188,
            pages_per_checkpoint=3,
            min_cacheable_tokens=1,
            mamba_cache_mode=mode or "none",
            enable_prefix_caching=placement is not None,
        ),
    )
    scheduler = Scheduler(SchedulerConfig(max_model_len=MAX_LEN), cache, clock)
    runner = SimulatedRunner(LAYOUT, num_pages, 8, tokenizer.vocab_size, numerics=False)
    return Core(info, scheduler, runner, tokenizer, (), 0)


class Talk:
    """Chats with one core. `paths`: what has been computed, as tokens."""

    def __init__(self, core: Core, tokenizer: ModelTokenizer) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self.paths: list[list[int]] = [[]]
        self.count = 0

    def ask(self, messages, breakpoints=(), max_tokens: int = 4) -> tuple[CacheReport, list[int], int]:
        """The report, the ends of the messages, and how much was shared with anything computed before."""
        rendered = self.tokenizer.render_chat(messages, tools=TOOLS, breakpoints=breakpoints)
        shared = max(common(rendered.token_ids, path) for path in self.paths)
        self.count += 1
        self.core.submit(
            generate_request(
                request_id=f"r{self.count}",
                prompt=np.array(rendered.token_ids, np.int64).tobytes(),
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                boundaries=rendered.boundaries,
            )
        )
        outputs = []
        while self.core.has_work:
            outputs += self.core.step()
        self.core.idle()
        answer = [token for output in outputs for token in output.token_ids]
        self.paths.append(rendered.token_ids + answer[:-1])
        report = outputs[-1].cache
        assert report is not None
        return report, [end.position for end in rendered.boundaries], shared


def common(one, other) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


FORMS = ["drops_reasoning", "hollows_reasoning"]


@pytest.fixture(params=[*product(["tags"], FORMS), ("tensors", FORMS[0]), more(("tensors", FORMS[1]))], ids=" ".join)
def folder(request, tiny_model: Path, tmp_path: Path) -> tuple[str, Path]:
    """Which engine, and a checkpoint folder with a template of that form."""
    engine, form = request.param
    copy = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATES[form]}))
    return engine, copy


def talk(folder: tuple[str, Path], mode: str = "auto") -> Talk:
    engine, path = folder
    tokenizer = ModelTokenizer(path)
    if engine == "tags":
        return Talk(simulated(tokenizer, mode), tokenizer)
    config = EngineConfig(model=str(path), dtype="float32", kv_cache_memory_bytes=256 << 20, mamba_cache_mode=mode)
    return Talk(build_core(config, ManualClock()), tokenizer)


def assert_hit(report: CacheReport, ends: list[int], shared: int) -> None:
    """All of what is shared, or up to the last message that ends in it, and never a chunk less."""
    boundary = max((end for end in ends if end <= shared), default=0)
    assert shared - 63 <= report.cached_tokens <= shared
    assert report.cached_tokens >= boundary
    # or further on, where the grid happens to have a point between the message's end and where the prompts part
    assert report.cached_tokens in (boundary, shared) or report.cached_tokens % 64 == 0
    assert report.computed_tokens == report.prompt_tokens - report.cached_tokens


def test_twenty_turns(folder):
    """Tools in the system segment, tool results, and reasoning that the template drops after the next question."""
    speaker = talk(folder)
    parted, at_boundary = [], 0
    requests = agent_messages(7, rounds=2, results=1)[:20]
    lengths = []
    for number, messages in enumerate(requests):
        report, ends, shared = speaker.ask(messages)
        assert_hit(report, ends, shared)
        if number and shared < lengths[-1]:
            parted.append(number)
            at_boundary += report.cached_tokens in ends
        lengths.append(report.prompt_tokens)
    assert len(lengths) == 20
    # with a new question the reasoning behind the last one is dropped, and the prompt parts from all before
    assert parted == list(range(3, 20, 3)) and at_boundary >= 5
    stats = speaker.core.stats()
    assert stats.tokens.computed_prompt == sum(lengths) - stats.prefix_cache.hits < sum(lengths) // 4


def test_eight_branches_from_one_history(folder):
    """One after another: what they share is computed once."""
    speaker = talk(folder)
    history = agent_messages(3, rounds=1, results=2)[-1] + [{"role": "assistant", "content": "It leads to cairn 2."}]
    computed = []
    for branch in range(8):
        report, ends, shared = speaker.ask([*history, {"role": "user", "content": f"{branch}: and from there?"}])
        computed.append(report.computed_tokens)
        if branch:
            assert_hit(report, ends, shared)
            assert report.cached_tokens >= ends[-2]  # the end of the history
    assert max(computed[1:]) < 64 < computed[0]


def test_a_new_chat_begins_behind_the_tools(folder):
    speaker = talk(folder)
    speaker.ask(agent_messages(2)[-1])
    messages = [agent_messages(1)[0][0], {"role": "user", "content": "Something else: how old is the oldest cairn?"}]
    report, ends, shared = speaker.ask(messages)
    assert_hit(report, ends, shared)
    assert report.cached_tokens >= ends[0] > 200


def test_no_more_rounds_than_without_a_cache(folder):
    if folder[0] == "tensors":
        pytest.skip("rounds are the scheduler's: the runner of tags shows them")
    rounds = {}
    for mode in (None, "auto"):
        tokenizer = ModelTokenizer(folder[1])
        core = simulated(tokenizer, mode)
        speaker = Talk(core, tokenizer)
        for messages in agent_messages(4):
            speaker.ask(messages)
        rounds[mode] = core.stats().steps.num_steps
    # one to save the state at each answer's end; none for what is kept inside the passes
    assert rounds["auto"] <= rounds[None] + 12


def test_breakpoints_are_held_and_said_so(folder):
    speaker = talk(folder)
    messages = agent_messages(2)[2]
    points = [Breakpoint(seconds=300), Breakpoint(message=1, seconds=3600)]
    first, ends, _ = speaker.ask(messages, points)
    assert first.held_breakpoints == 2
    again, _, _ = speaker.ask(messages, points)
    assert (again.held_breakpoints, again.cached_tokens) == (2, again.prompt_tokens)
    assert speaker.ask(messages)[0].held_breakpoints == 0
    held = {checkpoint.position for checkpoint in speaker.core._scheduler.state.cache.checkpoints.retained}
    assert held == {ends[0], ends[1]}


@pytest.mark.parametrize("name", first(2, TEMPLATES))
def test_other_forms_of_template(tmp_path: Path, tiny_model: Path, name: str) -> None:
    """Counted with tags: their tokens are more than the tiny checkpoint has."""
    tokenizer = tokenizer_with(tiny_model, tmp_path / "copy", TEMPLATES[name])
    speaker = Talk(simulated(tokenizer), tokenizer)
    for messages in agent_messages(7, rounds=2, results=1)[:20]:
        assert_hit(*speaker.ask(messages))
