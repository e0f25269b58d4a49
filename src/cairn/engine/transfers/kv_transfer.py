"""What a request's `kv_transfer_params` mean to the core, and what its answer says in return.

request                                        the scheduler's spec             answer
do_remote_decode (+ cairn_decode_hint)         kv_export (+ source: a hint)     the reference to what is held
do_remote_prefill + a reference                source: a promise                cairn_decode_hint: what is here now
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from cairn.engine.contract import TransferReport
from cairn.engine.transfers.loop import TransferLoop, TransferPort
from cairn.errors import EngineDead, InvalidRequest
from cairn.scheduler.request import Offered, Request
from cairn.scheduler.transfers import LeaseQuota, Sequences, Transfers
from cairn.transfer.contract import TransferRole
from cairn.transfer.params import HINT, parse_kv_transfer_params
from cairn.transfer.peers import PeerPolicy

_NAME = "kv_transfer_params"


def _nothing() -> None:
    """There is nothing to close."""


@dataclass(eq=False)
class KvTransfer:
    """One engine's side of the transfers, as the core sees it. Other servers are told `host` and `side_port`.
    `close_ways` ends those to the other ranks. `quota`: how much may be held for other servers."""

    engine_id: str
    host: str
    side_port: int
    tp_size: int
    policy: PeerPolicy
    port: TransferPort
    loop: TransferLoop
    sequences: Sequences
    close_ways: Callable[[], None] = _nothing
    quota: LeaseQuota = field(default_factory=LeaseQuota)

    @property
    def transfers(self) -> Transfers:
        """For the scheduler."""
        return Transfers(self.port, self.sequences, self.quota)

    def start(self, notify: Callable[[], None]) -> None:
        self.loop.notify = notify
        self.loop.start()

    def close(self) -> None:
        self.loop.stop()
        self.close_ways()

    def check(self) -> None:
        """Raises EngineDead when the transfer thread has ended: nobody would serve the leases."""
        if self.loop.failure is not None:
            raise EngineDead(f"the transfer thread has ended: {self.loop.failure}")

    def answer(self, request: Request) -> bytes | None:
        """`kv_transfer_params` of the response, as JSON."""
        if request.transfer.offered is not None:
            return msgspec.json.encode(self._reference(request, request.transfer.offered))
        if request.spec.role.source is not None and request.spec.role.source.nonce is not None:
            hint = {
                "engine": self.engine_id,
                "host": self.host,
                "port": self.side_port,
                "num_tokens": request.num_computed,
            }
            return msgspec.json.encode({HINT: hint})
        return None

    def _reference(self, request: Request, offered: Offered) -> dict[str, object]:
        first, offer = request.stats.first_sequence, offered.offer
        files = [checkpoint.pages.tolist() for checkpoint in offer.checkpoints]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [offer.pages.tolist(), *files],
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


def report(request: Request) -> TransferReport | None:
    """What the request's own pull has read."""
    pulled = request.transfer.pulled
    if pulled is None or pulled.volume is None:
        return None
    volume = pulled.volume
    return TransferReport(
        seconds=request.transfer.pull_seconds, num_bytes=volume.num_bytes, num_descriptors=volume.num_descriptors
    )
