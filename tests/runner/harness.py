"""Tiny random models and a driver that plans by hand. A config's family is asked for what depends on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.kernels.state_encoding import ENCODINGS
from cairn.layers.communicator import Communicator
from cairn.layers.model import Model
from cairn.models.contract import Family
from cairn.models.decoder_builder import Execution, build_decoder
from cairn.models.families import FAMILIES, family_of
from cairn.models.sharding import TensorShard
from cairn.runner.plan_check import CheckedRunner, PlanLimits
from cairn.runner.runner import Runner
from cairn.runner.vision import VisionEncoder
from cairn.step import Snapshot, StepResult
from cairn.types import Pages, SamplingParams
from doubles.hand_plans import PlanWriter, WholeRow
from doubles.rank_threads import RankThreads
from doubles.thread_ranks import thread_ranks

GREEDY = SamplingParams(temperature=0.0)

BY_CONFIG = {family.config: family for family in FAMILIES.values()}


def family(config: Any) -> Family:
    return BY_CONFIG[type(config)]


def parse(raw: Mapping[str, Any]) -> Any:
    """The config of a raw one, of whatever family."""
    return family_of(raw).parse(raw)


def tensors(config: Any) -> dict[str, tuple[int, ...]]:
    return family(config).tensors(config)


def raw_config(pattern: str, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model; sizes are chosen so that no two of them are equal by accident."""
    raw: dict[str, Any] = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "vocab_size": 97,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 12,
        "ssm_state_size": 20,
        "n_groups": 2,
        "conv_kernel": 4,
        "intermediate_size": 56,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
    return raw | changes


def random_weights(config: Any, seed: int) -> dict[str, Tensor]:
    """Weights by published name, of a size that keeps every layer's output near 1; decay and router are spread out."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(shape: tuple[int, ...], low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    weights = {}
    for name, shape in tensors(config).items():
        last = name.rsplit(".", 1)[1]
        if last == "A_log":
            weights[name] = uniform(shape, 0.0, 2.8)
        elif last == "dt_bias":
            weights[name] = uniform(shape, -10.0, 2.0)
        elif last == "D" or name.endswith(("norm.weight", "norm_f.weight")):
            weights[name] = uniform(shape, 0.5, 1.5)
        elif last in ("bias", "e_score_correction_bias"):
            weights[name] = uniform(shape, -0.2, 0.2)
        else:
            fan_in = 1 if "embeddings" in name else int(np.prod(shape[1:]))
            weights[name] = torch.randn(shape, generator=generator) * fan_in**-0.5
    return weights


def left_of(tensor: Tensor, shard: TensorShard | None) -> Tensor:
    """The shard of a tensor."""
    if shard is None:
        return tensor
    return torch.cat([tensor.narrow(shard.dim, begin, end - begin) for begin, end in shard.slices], shard.dim)


def build_tiny(
    config: Any, weights: dict[str, Tensor], exact: bool, dtype: torch.dtype = torch.float32, **options: Any
) -> Model:
    def load(name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> Tensor:
        assert tuple(weights[name].shape) == shape, name
        wanted = torch.float32 if name.endswith(family(config).float32_tensors) else dtype
        return left_of(weights[name], shard).to(wanted, copy=True)

    return build_decoder(family(config).spec(config), load, Execution(exact, dtype, **options))


@dataclass
class Track:
    """One sequence being driven: its slot, its pages, of one attention group after the other, for `length` tokens, and
    how far it has been computed."""

    slot: int
    pages: Pages
    position: int = 0
    kv_write_from: int = 0
    length: int = 0


@dataclass
class Driver:
    """A runner with page accounting as simple as it gets: pages are handed out and never come back."""

    config: Any
    model: Model
    exact: bool
    num_pages: int = 512
    num_slots: int = 8
    block_size: int = 16
    vision: VisionEncoder | None = None
    checkpoint_dtype: str = "float32"
    runner: Runner = field(init=False)
    logits: list[tuple[SamplingMetadata, Tensor]] = field(init=False, default_factory=list)
    step: int = field(init=False, default=0)
    next_page: int = field(init=False, default=0)
    writer: PlanWriter = field(init=False)
    checked: CheckedRunner = field(init=False)

    def __post_init__(self) -> None:
        encoding = None if self.checkpoint_dtype == "float32" else ENCODINGS[self.checkpoint_dtype]
        self.layout = self.config.layout(self.block_size, self.model.spec.dtype.itemsize, encoding=encoding)
        self.runner = Runner(
            self.model,
            self.layout,
            self.num_pages,
            self.num_slots,
            self.exact,
            observe=self._observe,
            vision=self.vision,
        )
        self.runner.pool.fill_(0xFF)  # recycled pages may hold bytes that read as NaN
        self._begin(self.model)

    def _begin(self, model: Model) -> None:
        aligned = self.exact and model.spec.recurrent is not None
        limits = PlanLimits(self.layout, self.num_pages, self.num_slots, model.vocab_size, aligned)
        self.checked = CheckedRunner(self.runner, limits)
        self.writer = PlanWriter(len(self.layout.groups))

    def _observe(self, sample: SamplingMetadata, logits: Tensor) -> None:
        self.logits.append((sample, logits.clone()))

    def allocate(self, count: int) -> Pages:
        pages = np.arange(self.next_page, self.next_page + count, dtype=np.int32)
        self.next_page += count
        assert self.next_page <= self.num_pages
        return pages

    def file(self) -> Pages:
        return self.allocate(self.layout.pages_per_checkpoint)

    def sequence(self, slot: int, length: int) -> Track:
        return Track(slot, self.allocate(self.layout.pages_for(length)), length=length)

    def tables(self, seq: Track) -> tuple[Pages, ...]:
        """The pages of each attention group."""
        groups = self.layout.groups
        if len(groups) < 2:
            return (seq.pages,) * len(groups)
        return tuple(np.split(seq.pages, np.cumsum([group.pages_for(seq.length) for group in groups])[:-1]))

    def row(self, seq: Track, tokens: Sequence[int] | int, sample: bool = True, decode: bool = False) -> WholeRow:
        """`tokens`: SAMPLED, or all of them."""
        count = 1 if isinstance(tokens, int) else len(tokens)
        start, end = seq.position, seq.position + count
        seq.position = end
        return WholeRow(
            slot=seq.slot,
            start=start,
            end=end,
            tokens=tokens if isinstance(tokens, int) else np.asarray(tokens, dtype=np.int64),
            pages=self.tables(seq),
            kv_write_from=seq.kv_write_from,
            decode=decode,
            sample=SamplingMetadata(GREEDY, end) if sample else None,
        )

    def run(self, *rows: WholeRow, snapshots: Sequence[Snapshot] = (), **records: Any) -> list[Tensor]:
        """The logits of the rows and sample_only records that sample."""
        self.result = self.submit(*rows, snapshots=snapshots, **records)
        return [logits for _, logits in self.logits]

    def submit(self, *rows: WholeRow, snapshots: Sequence[Snapshot] = (), **records: Any) -> StepResult:
        self.step += 1
        self.logits.clear()
        return self.checked.run(self.writer.plan(self.step, rows, snapshots=snapshots, **records))

    def file_bytes(self, pages: Pages) -> Tensor:
        return self.runner.pool[torch.from_numpy(pages.astype(np.int64))].flatten()[: self.layout.checkpoint_bytes]


class RunnersSideBySide(RankThreads):
    """Runners of all ranks with what the tests read of one runner."""

    @property
    def pool(self) -> Tensor:
        """A copy: all ranks' bytes of a page one behind the other."""
        return torch.cat([runner.pool for runner in self.runners], dim=1)

    def get_ready(self) -> None:
        for runner in self.runners:
            runner.get_ready()


@dataclass
class RanksDriver(Driver):
    """A driver of several ranks as threads; `model` is rank 0's. Their logits and tokens have to be the same."""

    others: Sequence[Model] = ()

    def __post_init__(self) -> None:
        models = [self.model, *self.others]
        self.layout = self.config.layout(self.block_size, self.model.spec.dtype.itemsize, len(models))
        self.seen: list[list[Tensor]] = [[] for _ in models]
        runners = [
            Runner(model, self.layout, self.num_pages, self.num_slots, self.exact, observe=self._observer(rank))
            for rank, model in enumerate(models)
        ]
        for runner in runners:
            runner.pool.fill_(0xFF)
        self.runner = RunnersSideBySide(runners)
        self._begin(self.model)

    def _observer(self, rank: int) -> Any:
        def observe(sample: SamplingMetadata, logits: Tensor) -> None:
            self.seen[rank].append(logits.clone())
            if rank == 0:
                self._observe(sample, logits)

        return observe

    def submit(self, *rows: WholeRow, snapshots: Sequence[Snapshot] = (), **records: Any) -> StepResult:
        for seen in self.seen:
            seen.clear()
        result = super().submit(*rows, snapshots=snapshots, **records)
        for seen in self.seen[1:]:
            assert len(seen) == len(self.seen[0])
            assert all(torch.equal(one, other) for one, other in zip(seen, self.seen[0], strict=True))
        return result

    def file_bytes(self, pages: Pages) -> Tensor:
        places = torch.from_numpy(pages.astype(np.int64))
        files = [runner.pool[places].flatten()[: self.layout.checkpoint_bytes] for runner in self.runner.runners]
        return torch.cat(files)


def ranks(config: Any, weights: dict[str, Tensor], size: int, exact: bool, **options: Any) -> RanksDriver:
    """A driver of `size` ranks as threads."""
    driver = {name: options.pop(name) for name in ("num_pages", "num_slots", "block_size") if name in options}

    def one(communicator: Communicator) -> Model:
        return build_tiny(config, weights, exact, communicator=communicator, **options)

    first, *others = (one(communicator) for communicator in thread_ranks(size))
    return RanksDriver(config, first, exact, others=others, **driver)


def tiny(pattern: str, *, exact: bool, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Driver:
    names = ("num_pages", "num_slots", "block_size", "checkpoint_dtype")
    driver = {name: changes.pop(name) for name in names if name in changes}
    config = parse(raw_config(pattern, **changes))
    return Driver(config, build_tiny(config, random_weights(config, seed), exact, dtype), exact, **driver)


def prompt(length: int, seed: int, vocab: int = 97) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()
