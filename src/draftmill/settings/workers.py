"""How many processes this host lets us use: affinity, memory and cgroup limits, never a guess."""

import os
from pathlib import Path

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")
_CGROUP_MEMORY_NOW = Path("/sys/fs/cgroup/memory.current")
MOST_THREADS = 1 << 10
"""A larger number is a slip, and a library's trouble."""


def usable_cores() -> int:
    """CPU cores this process may use: its affinity mask, lowered by a cgroup v2 quota; at least 1."""
    cores = len(os.sched_getaffinity(0))
    if _CGROUP_CPU_MAX.is_file():
        quota, period = _CGROUP_CPU_MAX.read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def total_memory_bytes() -> int:
    """Bytes of memory that this host has in all, lowered by a cgroup."""
    total = _meminfo_bytes("MemTotal")
    limit = _CGROUP_MEMORY_MAX.read_text().strip() if _CGROUP_MEMORY_MAX.is_file() else "max"
    return total if limit == "max" else min(total, int(limit))


def usable_memory_bytes() -> int:
    """Bytes of memory this process and its children may still take: what the host has free, lowered by a cgroup."""
    free = _meminfo_bytes("MemAvailable")
    if _CGROUP_MEMORY_MAX.is_file() and (limit := _CGROUP_MEMORY_MAX.read_text().strip()) != "max":
        free = min(free, int(limit) - int(_CGROUP_MEMORY_NOW.read_text()))
    return max(0, free)


def _meminfo_bytes(name: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024
