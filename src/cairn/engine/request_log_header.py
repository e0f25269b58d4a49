"""The request log's first line, and its parts put together."""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from cairn.cache.layout import CacheLayout
from cairn.engine.contract import EngineConfig, EngineInfo
from cairn.engine.request_log import RequestLog
from cairn.engine.request_log_file import LogFile
from cairn.engine.request_log_lines import LogLines
from cairn.models.forward_sizes import ForwardSizes
from cairn.types import Clock

VERSION = 2
UNIT = 64
"""Tokens of a block hash."""
KEY_BYTES = 32
MAX_WRITTEN_TOKENS = 1 << 24
"""For how many tokens the block hashes in the file are remembered: 30 MiB."""


def open_log(
    config: EngineConfig, info: EngineInfo, layout: CacheLayout, sizes: ForwardSizes, clock: Clock
) -> RequestLog | None:
    """None if no log was asked for. `layout`: of one rank; `sizes`: of the whole model. Raises ConfigError when the log
    cannot be written."""
    asked = config.request_log
    if asked is None:
        return None
    first = header(config, info, layout, sizes)
    file = LogFile(Path(asked.path), asked.max_bytes, partial(_new_lines, first))
    return RequestLog(file, clock, layout.block_size)


def _new_lines(first: Mapping[str, object]) -> LogLines:
    # a key for each file, so that not even two files of one server can be told to be about the same texts
    begun = {**first, "began": round(time.time(), 3)}
    return LogLines(begun, UNIT, os.urandom(KEY_BYTES), MAX_WRITTEN_TOKENS)


def header(config: EngineConfig, info: EngineInfo, layout: CacheLayout, sizes: ForwardSizes) -> dict[str, object]:
    """What a replay has to know of the server: sizes in bytes and tokens, and in elements of matrices. `salted`: hashes
    are keyed."""
    return {
        "name": os.path.basename(os.path.normpath(info.model)),
        "unit": UNIT,
        "source": "cairn",
        "version": VERSION,
        "salted": True,
        "layout": asdict(layout),
        "forward_sizes": asdict(sizes),
        "budget_bytes": info.num_pages * layout.page_bytes,
        "policy": {
            "placement": info.mamba_cache_mode if info.enable_prefix_caching else "none",
            "eviction": config.eviction,
            "exact": info.exact,
        },
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": info.max_num_seqs,
    }
