"""Cores and memory of machines and containers, told by files that are made here."""

import pytest

from cairn.machine import Machine

MIB = 1 << 20
V1_NO_LIMIT = "9223372036854771712"
NO_LIMITS: dict[str, str] = {}


def machine(root, num_cpus=8, available=1000 * MIB, groups="", **files):
    """`groups`: /proc/self/cgroup; `files`: contents by path below /sys/fs/cgroup."""
    paths = {"proc/self/cgroup": groups, "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {available >> 10} kB\n"}
    for path, text in (paths | {f"sys/fs/cgroup/{name}": text for name, text in files["files"].items()}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")
    return Machine(root, lambda: range(num_cpus))


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("", NO_LIMITS, 8),
        ("0::/a/b", {"a/b/cpu.max": "max 100000"}, 8),
        ("0::/a/b", {"a/b/cpu.max": "200000 100000"}, 2),
        ("0::/a/b", {"a/b/cpu.max": "250000 100000"}, 2),
        ("0::/a/b", {"a/b/cpu.max": "20000 100000"}, 1),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ("0::/a/b", {"a/b/cpu.max": "200000 100000", "a/cpu.max": "300000 100000"}, 2),
        ("0::/a/b", {"a/b/cpu.max": "9900000 100000"}, 8),
        # a container that sees the host's path of its group, and its own folder alone
        ("0::/docker/1f", {"cpu.max": "400000 100000"}, 4),
        ("3:cpu,cpuacct:/a\n2:memory:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
        ("3:cpu,cpuacct:/a\n2:memory:/a", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "10000"}, 5),
        ("1:cpu:/a\n0::/a", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "10000"}, 5),
        ("3:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "0"}, 8),
        ("nonsense\n::\n0:", {"cpu.max": "what is this"}, 8),
    ],
)
def test_cores(tmp_path, groups, files, cores):
    assert machine(tmp_path, groups=groups, files=files).num_cores() == cores


def test_cores_are_those_of_the_affinity(tmp_path):
    files = {"cpu.max": "400000 100000"}
    assert machine(tmp_path, num_cpus=3, groups="0::/", files=files).num_cores() == 3


def v2(folder, limit, current, **files):
    stat = f"anon 5\ninactive_file {files.get('inactive', 0)}\nactive_file {files.get('active', 0)}"
    high = {f"{folder}memory.high": files["high"]} if "high" in files else {}
    return {f"{folder}memory.max": limit, f"{folder}memory.current": str(current), f"{folder}memory.stat": stat} | high


def v1(limit, usage, inactive=0):
    stat = f"inactive_file 77\ntotal_inactive_file {inactive}\ntotal_active_file 0"
    texts = {"limit_in_bytes": limit, "usage_in_bytes": str(usage), "stat": stat}
    return {f"memory/a/memory.{name}": text for name, text in texts.items()}


@pytest.mark.parametrize(
    ("groups", "files", "available"),
    [
        ("", NO_LIMITS, 1000),
        ("0::/a/b", v2("a/b/", "max", 900 * MIB), 1000),
        ("0::/a/b", v2("a/b/", str(600 * MIB), 200 * MIB), 400),
        # page cache goes where memory is wanted
        ("0::/a/b", v2("a/b/", str(600 * MIB), 500 * MIB, inactive=300 * MIB, active=100 * MIB), 500),
        ("0::/a/b", v2("a/b/", str(600 * MIB), 200 * MIB, high=str(500 * MIB)), 300),
        ("0::/a/b", v2("a/b/", "max", 200 * MIB, high=str(500 * MIB)), 300),
        ("0::/a/b", v2("a/b/", "max", 0) | v2("a/", str(300 * MIB), 250 * MIB), 50),
        ("0::/a/b", v2("a/b/", str(300 * MIB), 400 * MIB), 0),
        ("0::/a/b", v2("a/b/", str(4000 * MIB), 0), 1000),
        ("0::/docker/1f", v2("", str(600 * MIB), 0), 600),
        ("2:memory:/a", v1(V1_NO_LIMIT, 900 * MIB), 1000),
        ("2:memory:/a", v1(str(600 * MIB), 200 * MIB), 400),
        ("2:memory:/a", v1(str(600 * MIB), 200 * MIB, inactive=100 * MIB), 500),
        ("2:cpu:/a", v1(str(600 * MIB), 0), 1000),
        ("0::/a", {"a/memory.max": str(600 * MIB)}, 600),
    ],
)
def test_memory(tmp_path, groups, files, available):
    assert machine(tmp_path, groups=groups, files=files).available_memory() == available * MIB


def test_memory_that_nobody_tells_of(tmp_path):
    assert Machine(tmp_path).available_memory() is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 5 kB\n")
    assert Machine(tmp_path).available_memory() is None


def test_this_machine():
    this = Machine()
    assert this.num_cores() >= 1 and (this.available_memory() or 0) > 0
