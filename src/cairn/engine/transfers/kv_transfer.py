"""KV transfer of one engine, as its core sees it: what a request's `kv_transfer_params` mean, what its answer says in
return, and how all of it is built from the configuration. Imports no torch and no NIXL.

request                                        the scheduler's spec                 answer
do_remote_decode (+ cairn_decode_hint)         kv_export (+ a source, no lease)     the reference to the lease
do_remote_prefill + a reference                a source with a lease                cairn_decode_hint: what is here now
"""

import logging
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cairn.cache.layout import CacheLayout
from cairn.engine.contract import KvTransferConfig, TransferReport
from cairn.engine.transfers.loop import ClockedLoop, EventQueue, TransferLoop
from cairn.engine.transfers.side_channel import SideChannel, create_listener
from cairn.errors import EngineDead, InvalidRequest
from cairn.paths import read_secret_file
from cairn.scheduler.request import PromptOffer, Request
from cairn.scheduler.transfers import LeaseQuota, Transfers
from cairn.transfer.consumer import Consumer
from cairn.transfer.contract import KvSource, Peer, TransferRole
from cairn.transfer.credentials import derive_credentials
from cairn.transfer.digest import SequenceIndex
from cairn.transfer.geometry import ModelUnits, PairedPages
from cairn.transfer.leases import LeaseLimits
from cairn.transfer.links.contract import Link
from cairn.transfer.links.gpu_paths import describe_gpu_paths
from cairn.transfer.memory import PoolMemory
from cairn.transfer.params import HINT, RELEASE_KEY, Hint, parse_kv_transfer_params
from cairn.transfer.peers import PeerPolicy, is_loopback
from cairn.transfer.producer import Producer
from cairn.transfer.ranks import RankChannel, RankedWorker
from cairn.transfer.session import ConsumerTools
from cairn.transfer.worker import LinkWorker
from cairn.types import Clock

_NAME = "kv_transfer_params"
_KEY_CHARS = 32

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class KvTransfer:
    """KV transfer of one engine. Other servers reach it at `host` and `side_port`. `transfers`: for the scheduler.
    `resources` are closed with it."""

    engine_id: str
    host: str
    side_port: int
    tp_size: int
    policy: PeerPolicy
    loop: TransferLoop
    transfers: Transfers
    resources: ExitStack = field(default_factory=ExitStack)

    def start(self, notify: Callable[[], None]) -> None:
        self.loop.start(notify)

    def close(self) -> None:
        self.loop.stop()
        self.resources.close()

    def check(self) -> None:
        """Raises EngineDead when the transfer thread has ended: nobody would serve the leases."""
        if self.loop.failure is not None:
            raise EngineDead(f"the transfer thread has ended: {self.loop.failure}")

    def response_params(self, request: Request) -> bytes | None:
        """`kv_transfer_params` of the response, as JSON."""
        if request.transfer.offered is not None:
            return msgspec.json.encode(self._reference(request, request.transfer.offered))
        if request.spec.role.source is not None and request.spec.role.source.nonce is not None:
            hint = Hint(self.engine_id, self.host, self.side_port, request.num_computed)
            return msgspec.json.encode({HINT: hint})
        return None

    def _reference(self, request: Request, offered: PromptOffer) -> dict[str, object]:
        first, offer = request.stats.first_sequence, offered.offer
        files = [checkpoint.pages.tolist() for checkpoint in offer.checkpoints]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [*([part.pages.tolist() for part in offer.pages] or [[]]), *files],
            "remote_engine_id": self.engine_id,
            "remote_request_id": offered.reference,
            "remote_host": self.host,
            "remote_port": self.side_port,
            "tp_size": self.tp_size,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(offer.keys),
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0 if first is None else first.hit,
        }


def parse_role(params: object, transfer: KvTransfer | None) -> TransferRole:
    """`params`: see `specs.transfer_params`. Raises InvalidRequest that names the key; also where this server takes no
    part in transfers and is asked to."""
    role = parse_kv_transfer_params(params, PeerPolicy() if transfer is None else transfer.policy)
    if role is not None and transfer is None:
        raise InvalidRequest(
            f"{_NAME}: this server takes no part in transfers: start it with --kv-transfer-config", _NAME
        )
    return role or TransferRole()


def find_release_key(params: object) -> str | None:
    """What the id of the request ends with whose answer has not been waited for; None where a lease is named."""
    key = params.get(RELEASE_KEY) if isinstance(params, dict) else None
    return key if isinstance(key, str) and len(key) == _KEY_CHARS else None


def find_lease(params: object, transfer: KvTransfer) -> str | KvSource | None:
    """The lease that a request to decode refers to: its name if it is this server's own, else where it is; None for
    other requests. `params` as for `parse_role`. Raises InvalidRequest that names the key."""
    if isinstance(params, dict) and params.get("remote_engine_id") == transfer.engine_id:
        reference = params.get("remote_request_id")
        return reference if isinstance(reference, str) else None
    source = parse_role(params, transfer).source
    return source if source is not None and source.nonce is not None else None


def report(request: Request) -> TransferReport | None:
    """Duration and size of what was fetched for the request, None if nothing was."""
    fetched = request.transfer.fetched
    if fetched is None:
        return None
    seconds = request.transfer.fetch_seconds
    return TransferReport(seconds=seconds, num_bytes=fetched.num_bytes, num_descriptors=fetched.num_descriptors)


MakeLink = Callable[[str], Link]
"""Makes a link, without a registered region, for this host of the side channel. Raises ConfigError."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's `pool`. `units`: of the whole model, shared out among the ranks."""

    pool: PoolMemory
    layout: CacheLayout
    units: ModelUnits
    rank: int = 0


def nixl_link(host: str) -> Link:
    """A NIXL link; on loopback UCX uses no other network. Raises ConfigError when NIXL is not installed."""
    if is_loopback(host):
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    from cairn.transfer.links.nixl import NixlLink

    return NixlLink("cairn")


def rank_worker(link: Link, memory: RankMemory) -> LinkWorker:
    """Registers this rank's memory with its link; returns the worker that reads into it. Raises ConfigError where the
    link cannot reach a GPU's memory."""
    region = memory.pool.region
    link.register(region)
    if region.device is not None:
        logger.info("--kv-transfer-config: %s", describe_gpu_paths(region.device))
    pages = PairedPages(memory.units, memory.layout, memory.rank)
    return LinkWorker(link, pages, memory.pool.fence)


def build_transfer(
    config: KvTransferConfig,
    memory: RankMemory,
    layout_hash: bytes,
    clock: Clock,
    *,
    make_link: MakeLink = nixl_link,
    ranks: Sequence[tuple[RankChannel, bytes]] = (),
) -> KvTransfer:
    """`ranks`: the channels to the other ranks' servants, and the descriptions of their links. Raises ConfigError that
    names the flag or variable."""
    policy = PeerPolicy(config.peers, has_secret=config.secret_file is not None)
    secret = b"" if config.secret_file is None else read_secret_file(Path(config.secret_file))
    if not secret:
        logger.warning(
            "transfers without --kv-secret-file: whatever listens on a port of this machine that a client names as "
            "remote_port is believed, and every local process may read this server's cache"
        )
    link = make_link(config.host)
    worker = RankedWorker(link, rank_worker(link, memory), [channel for channel, _ in ranks])
    described = (link.describe(), *(description for _, description in ranks))
    engine_id = str(uuid.uuid4())
    me = Peer(engine_id, memory.layout, described, layout_hash)
    listener = create_listener(config.host, config.port)
    event_loop, events = ClockedLoop(clock), EventQueue()
    channel = SideChannel(listener, derive_credentials(secret), event_loop)
    limits = LeaseLimits(
        max_pages=int(memory.pool.region.num_pages * config.lease_share), duration=config.lease_seconds
    )
    producer = Producer(me, limits, clock, os.urandom, events.put)
    tools = ConsumerTools(me, worker, channel.connect, os.urandom, event_loop)
    consumer = Consumer(tools, policy, clock, events.put)
    loop = TransferLoop(event_loop, producer, consumer, events, channel, worker, memory.pool.enter_thread)
    quota = LeaseQuota(
        max_leases=config.max_leases,
        max_leases_per_client=config.max_leases_per_client,
        wait_seconds=config.lease_seconds,
    )
    transfers = Transfers(loop, SequenceIndex(layout_hash), quota)
    return KvTransfer(engine_id, config.host, channel.port, memory.layout.tp_size, policy, loop, transfers)
