"""What this process may use of its machine: cores, and memory, within the limits of its control groups."""

import mmap
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path


def _process_affinity() -> Collection[int]:
    return os.sched_getaffinity(0)


class Machine:
    """Reads the machine anew with every call. Linux: what is not told there counts as no limit.

    `root`: where proc and sys are mounted; `affinity`: the cores that this process may be scheduled on.
    """

    def __init__(self, root: Path = Path("/"), affinity: Callable[[], Collection[int]] = _process_affinity) -> None:
        self._root = root
        self._affinity = affinity

    def num_cores(self) -> int:
        """Whole cores that this process may keep busy: those of its affinity, or its CPU quota; at least 1."""
        limits = [float(len(self._affinity()))]
        for folder in self._cgroup_folders(""):
            quota, _, period = (_text(folder / "cpu.max") or "").partition(" ")
            limits += _quota(quota, period)
        for folder in self._cgroup_folders("cpu"):
            limits += _quota(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us"))
        return max(1, int(min(limits)))

    def available_memory(self) -> int | None:
        """Bytes that can still be taken without anybody being killed for it: what is free or easily reclaimed, and
        what the limits of the control groups leave. None where /proc/meminfo does not tell."""
        available = _numbers(self._root / "proc/meminfo").get("MemAvailable:")
        if available is None:
            return None
        left = [available << 10]
        for folder in self._cgroup_folders(""):
            # beyond memory.high a group is not killed, but slowed down until hardly anything moves
            limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(folder / name)) is not None]
            left += [limit - _used(folder, "memory.current", "") for limit in limits]
        for folder in self._cgroup_folders("memory"):
            limit = _number(folder / "memory.limit_in_bytes")
            if limit is not None:
                left.append(limit - _used(folder, "memory.usage_in_bytes", "total_"))
        return max(0, min(left))

    def has_nvidia_gpu(self) -> bool:
        """Whether NVIDIA's driver lists one, also where this process may not use it."""
        return any((self._root / "proc/driver/nvidia/gpus").glob("*"))

    def _cgroup_folders(self, controller: str) -> Iterator[Path]:
        """The folders of this process's control group and of all above it; `controller` "": those of version 2.

        In a container the group's path may be the host's, of which only the mount's own folder can be seen.
        """
        mounts = [controller] if controller else ["", "unified"]
        for line in (_text(self._root / "proc/self/cgroup") or "").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controller not in controllers.split(","):
                continue
            inner = Path(path.lstrip("/"))
            for mount in (self._root / "sys/fs/cgroup" / name for name in mounts):
                yield mount / inner
                yield from (mount / parent for parent in inner.parents)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def map_memory(num_bytes: int) -> mmap.mmap:
    """Private memory of this process, in huge pages where the kernel has them: it is taken as it is first written to,
    and the first write to a small page takes longer than to copy it. Raises OSError or OverflowError as `mmap`."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if (advice := getattr(mmap, "MADV_HUGEPAGE", None)) is not None:
        with suppress(OSError):  # a kernel without them: small pages do as well
            memory.madvise(advice)
    return memory


def _number(path: Path) -> int | None:
    """None where the file is not there, or holds no number, such as `max`."""
    text = _text(path)
    return int(text) if text is not None and text.isdecimal() else None


def _numbers(path: Path) -> dict[str, int]:
    """First and second word of each line that has a number there."""
    lines = (line.split() for line in (_text(path) or "").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _quota(quota: str | None, period: str | None) -> list[float]:
    """Cores; empty for no limit, which is written `max` or -1."""
    if not (quota and period and quota.isdecimal() and period.isdecimal() and int(period)):
        return []
    return [int(quota) / int(period)]


def _used(folder: Path, usage: str, prefix: str) -> int:
    """Bytes of a control group that cannot be reclaimed: all but the page cache."""
    files = _numbers(folder / "memory.stat")
    cache = files.get(f"{prefix}inactive_file", 0) + files.get(f"{prefix}active_file", 0)
    return max(0, (_number(folder / usage) or 0) - cache)
