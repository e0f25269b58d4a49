"""From an EngineConfig to a running core: model, pool, scheduler, runner, tokenizer. Imports torch."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from msgspec.structs import replace

from cairn.addresses import join_host_port
from cairn.cache.events import BlockEvents
from cairn.cache.eviction import eviction_for
from cairn.cache.layout import CacheLayout, reach_name
from cairn.cache.placement import PlacementPolicy
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.cpu_isa import max_cpu_isa
from cairn.engine.contract import CacheInfo, EngineConfig, EngineInfo
from cairn.engine.core import Core
from cairn.engine.decode_capture import records_decodes
from cairn.engine.devices import (
    Device,
    LoadedModel,
    OpenFolder,
    choose_device,
    explain_out_of_memory,
    layout_of,
    most_step_drafts,
    open_encoder,
    open_for_device,
    open_head,
    placement_of,
)
from cairn.engine.event_publisher import EventPublisher
from cairn.engine.grammars.compiler import GrammarCompiler
from cairn.engine.grammars.vocabulary import grammar_tokenizer
from cairn.engine.memory_plan import MemoryPlan, choose_max_model_len, count_pages, plan_memory
from cairn.engine.multimodal_keys import ImageKeys
from cairn.engine.ranks.runner import load_ranks
from cairn.engine.ranks.tiers import connect_tiers, tier_service
from cairn.engine.ranks.transfer import RankSockets, rank_service
from cairn.engine.ranks.wire import RankConfig, RankService, RankSizes
from cairn.engine.request_log.log import open_log
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.engine.tier_memory import allocate_pinned, open_tier_memory
from cairn.engine.tiers import RESTS, EngineTiers, PoolEvents, allocate_arena, check_tiers, open_stores, uses_tiers
from cairn.engine.transfers.device_pool import open_pool
from cairn.engine.transfers.kv_transfer import KvTransfer, MakeLink, RankMemory, build_transfer, nixl_link
from cairn.kernels.graphs import Graphs
from cairn.machine import Machine
from cairn.models.decoder_builder import load_kernels
from cairn.models.qwen3_5_vision import read_vision, tower_bytes
from cairn.models.registry import OpenModel, open_model
from cairn.runner.contract import StepRunner
from cairn.runner.decode_graphs import CudaGraphs
from cairn.runner.plan_check import CheckedRunner, PlanLimits
from cairn.runner.runner import Observe, Runner
from cairn.runner.vision import tower_identity
from cairn.scheduler.lookup_drafter import LookupDrafter
from cairn.scheduler.mtp_drafter import MTPDrafter
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.speculation import Drafter
from cairn.scheduler.state import SchedulerConfig
from cairn.scheduler.transfers import Transfers
from cairn.tiers.ranks import RankedTierMemory
from cairn.transfer.digest import layout_hash
from cairn.transfer.geometry import AttentionUnits, ModelUnits
from cairn.types import Clock, SystemClock

__all__ = ["build_core", "make_drafter"]

_STEP_SECONDS = 300.0
"""How long a rank may keep the others waiting within a step."""


def build_core(
    config: EngineConfig,
    clock: Clock | None = None,
    observe: Observe | None = None,
    make_link: MakeLink = nixl_link,
    machine: Machine | None = None,
    open_folder: OpenFolder = open_model,
    make_graphs: Callable[[], Graphs] | None = None,
) -> Core:
    """Load the model and allocate its memory. Raises ConfigError or ModelError naming the flag or the file.

    `observe` is called with each sampled row's logits. `make_link`: what moves bytes between servers. `machine`: whose
    memory is divided where the configuration leaves sizes open. `open_folder`: how the checkpoint's folder becomes an
    `OpenModel`, which benchmarks have make its weights up. `make_graphs`: what records decode steps; CUDA on a GPU, and
    nothing elsewhere, unless given. With several ranks it has to be a name that each of them can import.
    """
    clock = clock or SystemClock()
    machine = machine or Machine()
    config, opened = open_for_device(config, open_folder, machine)
    opened = open_head(config, opened)
    layout = layout_of(config, opened)
    placement = placement_of(config)
    check_tiers(config, layout)
    device = choose_device(config, opened)
    builder = _CoreBuilder(config, opened, layout, device, machine, clock)
    drafter = make_drafter(config, device, has_head=opened.config.serves_mtp)
    if make_graphs is None and device.is_gpu:
        make_graphs = CudaGraphs
    tokenizer = ModelTokenizer(Path(config.model), None if config.tokenizer is None else Path(config.tokenizer))

    with explain_out_of_memory(device):
        ranks, sizes = builder.build_ranks(observe, make_graphs)
    vocab_size = opened.config.vocab_size
    eos_token_ids = opened.eos_token_ids(tokenizer.eos_token_id, *tokenizer.harmony_ends)
    transfer = builder.build_transfer(ranks, make_link)
    image_keys = _image_keys(ranks.local_runner, opened, tokenizer)
    side_channel = None if transfer is None else join_host_port(transfer.host, transfer.side_port)
    info = builder.engine_info(placement, sizes, side_channel, reads_images=image_keys is not None)
    if drafter is not None:
        info = replace(info, num_speculative_tokens=config.speculative.num_speculative_tokens)
    publisher = EventPublisher(config.kv_events) if config.kv_events is not None and placement is not None else None
    events = _events(publisher, layout, config.exact, image_keys) if publisher is not None else None
    policy = CachePolicy(placement, eviction_for(config.eviction), config.exact)
    cache = PrefixCache(layout, sizes.num_pages, policy, clock)
    if events is not None:
        cache.observe(events)
    request_log = open_log(config, info, layout, opened.config.forward_sizes(), clock)
    transfers = Transfers() if transfer is None else transfer.transfers
    scheduler = Scheduler(builder.scheduling(info), cache, clock, transfers, request_log, drafter)
    pool_events = None if publisher is None or events is None else PoolEvents(events, publisher.publish)
    tiers = builder.build_tiers(ranks, cache, transfers, image_keys, pool_events)
    if tiers is not None:
        info = replace(info, tiers=tiers.names)
    return Core(
        info,
        scheduler,
        builder.checked(ranks, sizes.num_pages) if config.check_plans else ranks.runner,
        tokenizer,
        eos_token_ids,
        config.seed,
        transfer=transfer,
        events=publisher,
        image_keys=image_keys,
        encoder_counters=ranks.local_runner.encoder_counters,
        request_log=request_log,
        grammars=GrammarCompiler(partial(grammar_tokenizer, tokenizer, vocab_size, eos_token_ids), vocab_size, clock),
        tiers=tiers,
    )


@dataclass(frozen=True, slots=True)
class _Ranks:
    """What carries plans out, and rank 0's own part of it. `folder`: where the other ranks' sockets are."""

    runner: StepRunner
    local_runner: Runner
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class _CoreBuilder:
    """Builds the parts of one engine. `layout`: of one rank."""

    config: EngineConfig
    opened: OpenModel
    layout: CacheLayout
    device: Device
    machine: Machine
    clock: Clock

    def build_ranks(
        self, observe: Observe | None, make_graphs: Callable[[], Graphs] | None
    ) -> tuple[_Ranks, RankSizes]:
        """The runner, and the sizes of pool and slots: where there is no GPU they are known before weights are read."""
        config, opened, device = self.config, self.opened, self.device
        tp_size = config.tensor_parallel_size
        sizes = None if device.is_gpu else self._size_up(None)
        if tp_size == 1:
            model = opened.build(exact=config.exact, backend=device.backend, device=device.place)
            loaded_model = LoadedModel(config, opened, device, model, open_encoder(config, opened, device), make_graphs)
            sizes = sizes or self._size_up(loaded_model.measure_available_memory())
            runner = loaded_model.allocate(sizes.num_pages, sizes.num_slots, observe, self.clock)
            return _Ranks(runner, runner), sizes
        services: tuple[RankService, ...] = ()
        if config.kv_transfer is not None:
            services = (rank_service(config.kv_transfer.host, _model_units(opened)),)
        if uses_tiers(config):
            services = (*services, tier_service())
        graphs = None
        if make_graphs is not None and records_decodes(config):
            # By name: the other ranks are processes of their own.
            graphs = f"{make_graphs.__module__}:{make_graphs.__qualname__}"
        ranks = RankConfig(
            engine=config,
            serves_mtp=opened.config.serves_mtp,
            step_seconds=_STEP_SECONDS,
            services=services,
            graphs=graphs,
        )
        with load_ranks(ranks, device) as loaded:
            sizes = sizes or self._size_up(loaded.available_memory)
            ranked = loaded.allocate(sizes, observe)
        return _Ranks(ranked, ranked.local_runner, ranked.folder), sizes

    def build_transfer(self, ranks: _Ranks, make_link: MakeLink) -> KvTransfer | None:
        """None for a server that neither gives nor takes pages."""
        config, runner, tp_size = self.config, ranks.local_runner, self.config.tensor_parallel_size
        if config.kv_transfer is None:
            return None
        pool = open_pool(runner.pool)
        memory = RankMemory(pool, runner.layout, _model_units(self.opened))
        content = layout_hash(self._content_facts())
        sockets = None if ranks.folder is None else RankSockets(ranks.folder, tp_size)
        others = () if sockets is None else sockets.others
        transfer = build_transfer(config.kv_transfer, memory, content, self.clock, make_link=make_link, ranks=others)
        if sockets is not None:
            transfer.resources.callback(sockets.close)
        return transfer

    def build_tiers(
        self,
        ranks: _Ranks,
        cache: PrefixCache,
        transfers: Transfers,
        image_keys: ImageKeys | None,
        events: PoolEvents | None,
    ) -> EngineTiers | None:
        """None where nothing is kept below the pool."""
        config, device = self.config, self.device
        if not uses_tiers(config):
            return None
        facts = self._content_facts()
        if config.exact:
            # the same bits come of the same instructions alone
            isa = max_cpu_isa(os.environ) or "all"
            facts |= {
                "computed_by": f"{device.place} {torch.__version__} {torch.backends.cpu.get_cpu_capability()} {isa}"
            }
        num_ranks, on_host, local_runner = config.tensor_parallel_size, device.backend is None, ranks.local_runner
        memory, at_end = open_tier_memory(local_runner.pool, on_host=on_host), list[Callable[[], None]]()
        make_arena = allocate_pinned if device.is_gpu else allocate_arena
        if ranks.folder is not None:
            memory = ranked = RankedTierMemory(memory, cache.layout.page_bytes, connect_tiers(ranks.folder, num_ranks))
            # no GPU reaches it itself
            make_arena, at_end = allocate_arena, [ranked.close]
        has_spare_core = device.is_gpu or torch.get_num_threads() * num_ranks < self.machine.num_cores()
        layout = cache.layout.of_ranks(num_ranks)
        stores = open_stores(config, facts, layout, make_arena)
        rests = 0.0 if has_spare_core else RESTS
        at_end.append(stores.close)
        return EngineTiers(layout, stores, memory, cache, transfers, self.clock, image_keys, events, at_end, rests)

    def engine_info(
        self, placement: PlacementPolicy | None, sizes: RankSizes, side_channel: str | None, *, reads_images: bool
    ) -> EngineInfo:
        """What has been built. `placement`: None without a cache."""
        config, opened, layout = self.config, self.opened, self.layout
        return EngineInfo(
            model=config.model,
            architecture=opened.family.model_type,
            dtype=str(opened.dtype).removeprefix("torch."),
            vocab_size=opened.config.vocab_size,
            max_model_len=self._max_model_len(),
            max_num_seqs=sizes.num_slots,
            max_waiting=config.max_waiting,
            cpu_threads=torch.get_num_threads(),
            exact=config.exact,
            tensor_parallel_size=config.tensor_parallel_size,
            logs_requests=config.request_log is not None,
            quantization=opened.served_quantization,
            reads_images=reads_images,
            side_channel=side_channel,
            cache=CacheInfo(
                num_pages=sizes.num_pages,
                block_size=config.block_size,
                page_bytes=layout.page_bytes,
                bytes_per_token=layout.lasting_bytes_per_token,
                window_bytes=layout.window_bytes,
                checkpoint_bytes=layout.checkpoint_bytes,
                pages_per_checkpoint=layout.pages_per_checkpoint,
                checkpoint_dtype=layout.checkpoint_dtype,
                state_dtype=layout.state_dtype,
                min_cacheable_tokens=placement.min_cacheable if placement is not None else 0,
                mamba_cache_mode=config.mamba_cache_mode,
                enable_prefix_caching=placement is not None,
                shares_in_flight=config.in_flight_sharing and placement is not None,
            ),
        )

    def checked(self, ranks: _Ranks, num_pages: int) -> CheckedRunner:
        """The runner of all ranks, with a look at each plan before it is carried out."""
        aligned, vocab_size = self.config.exact and not self.layout.resumes_anywhere, self.opened.config.vocab_size
        limits = PlanLimits(self.layout, num_pages, ranks.local_runner.num_slots, vocab_size, aligned)
        return CheckedRunner(ranks.runner, limits)

    def scheduling(self, info: EngineInfo) -> SchedulerConfig:
        """How requests of this engine are scheduled."""
        config = self.config
        return SchedulerConfig(
            max_in_flight=self.device.max_in_flight,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_waiting=config.max_waiting,
            max_model_len=info.max_model_len,
            exact=config.exact,
            in_flight_sharing=config.in_flight_sharing,
            policy=config.scheduling_policy,
            on_load_failure="recompute" if config.kv_transfer is None else config.kv_transfer.on_failure,
        )

    def _size_up(self, available_memory: int | None) -> RankSizes:
        """`available_memory`: bytes that a GPU has left beside the weights; None for the machine's memory. Raises
        ConfigError for a pool or a length that does not fit."""
        config, layout = self.config, self.layout
        if available_memory is not None:
            plan = MemoryPlan(on_gpu=True, usable=available_memory)
        else:
            weights, images = self._host_bytes()
            plan = MemoryPlan(
                on_gpu=False,
                usable=self.machine.available_memory(),
                weights=weights,
                images=images,
                host_cache=int(config.host_cache_bytes or 0),
            )
        spec = self.opened.config.cache_spec(0, config.tensor_parallel_size).memory_spec(
            self.opened.dtype, torch.device("cpu")
        )
        plan = plan_memory(plan, config, layout, spec, self._max_model_len())
        return RankSizes(count_pages(plan.pool, layout), plan.num_slots)

    def _content_facts(self) -> dict[str, str | int]:
        """What must be equal for bytes to mean the same on two servers. Besides the model, what all of them once were
        is not said, so that those pair which do not know of anything else."""
        layout = self.layout
        facts: dict[str, str | int] = self.opened.transfer_facts() | {"exact": self.config.exact}
        if len(layout.groups) > 1 or layout.is_limited:
            facts["attention"] = ", ".join(reach_name(group.reach, group.chunked) for group in layout.groups)
        if layout.checkpoint_dtype != "float32":
            facts["checkpoint_dtype"] = layout.checkpoint_dtype
        if layout.state_dtype != "float32":
            facts["state_dtype"] = layout.state_dtype
        return facts

    def _host_bytes(self) -> tuple[int, int]:
        """Weights, with the vision tower's, and encoded images that are kept, on all ranks together. Raises
        ModelError."""
        config, opened = self.config, self.opened
        weights = opened.weight_bytes(opened.stored_tensors(), packed_dtype=load_kernels("cpu").packed_dtype)
        if config.language_model_only or (vision := read_vision(opened.folder)) is None:
            return weights, 0
        return weights + tower_bytes(vision, opened.dtype), int(config.mm_encoder_cache_bytes)

    def _max_model_len(self) -> int:
        return choose_max_model_len(self.config.max_model_len, self.opened.config.max_model_len)


def make_drafter(config: EngineConfig, device: Device, has_head: bool = False) -> Drafter | None:
    """What drafts as --speculative-config says; None for nothing. `has_head`: whether the model is served with a head
    that drafts, see `open_head`. Weights need not have been read for it."""
    asked = config.speculative
    if not most_step_drafts(config, on_cpu=device.backend is None and device.max_in_flight == 1):
        return None
    return MTPDrafter(asked) if has_head else LookupDrafter(asked)


def _model_units(opened: OpenModel) -> ModelUnits:
    spec, itemsize = opened.config.cache_spec(), opened.dtype.itemsize
    attention = (
        AttentionUnits(each.num_kv_heads, each.num_layers, each.head_dim * itemsize) for each in spec.attention
    )
    return ModelUnits(tuple(attention), spec.num_state_units)


def _events(publisher: EventPublisher, layout: CacheLayout, exact: bool, contents: ImageKeys | None) -> BlockEvents:
    anywhere = not layout.needs_checkpoints
    return BlockEvents(layout.block_size, publisher.publish, exact, resumes_anywhere=anywhere, contents=contents)


def _image_keys(runner: Runner, opened: OpenModel, tokenizer: ModelTokenizer) -> ImageKeys | None:
    """None where the model, or this server of it, reads no images."""
    token = tokenizer.image_token
    return None if runner.vision is None or token is None else ImageKeys(token, tower_identity(opened.folder))
