"""How many processes this host lets us use: affinity and cgroup limits, never a guess."""

import os
from pathlib import Path

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """CPU cores this process may use: its affinity mask, lowered by a cgroup v2 quota; at least 1."""
    cores = len(os.sched_getaffinity(0))
    if _CGROUP_CPU_MAX.is_file():
        quota, period = _CGROUP_CPU_MAX.read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)
