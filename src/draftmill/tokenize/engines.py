"""For who outgrows one machine: the parts of a plan as tasks of a Ray cluster or of a Slurm array.

A task does what `--shard i/n` does and needs paths alone, so any scheduler can run it; datatrove's executors start the
tasks. What its parts lack of being closed (see `flow.py`) the last task to end makes up for.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftmill.contracts.errors import DraftmillError
from draftmill.settings.tokenize import TokenizeSettings
from draftmill.storage.cache import cache_folder

Task = Callable[[Any, int, int], None]
"""Called with nothing of ours, the task's number from 0, and how many tasks there are."""

MAX_TASKS = 1000
"""An array job of Slurm may have 1,001 by default; further parts go round."""


def num_tasks(settings: TokenizeSettings, num_parts: int) -> int:
    """How many tasks an engine is to run: one a part, unless told otherwise."""
    return min(settings.tasks or MAX_TASKS, num_parts)


def start(task: Task, settings: TokenizeSettings, plan: str, tasks: int) -> Path:
    """Runs the tasks (Ray), or hands them to the queue (Slurm); the folder with their logs.

    The folder lies in the cache, which every machine that runs a task has to see.
    """
    logs = cache_folder() / "engines" / plan[:16]
    starters = {"ray": _start_ray, "slurm": _start_slurm}
    try:
        starters[settings.engine](task, settings, logs, tasks)
    except ModuleNotFoundError as error:
        raise DraftmillError(
            f"{error.name} is not installed, and --engine {settings.engine} needs it: pip install 'draftmill[cluster]'"
        ) from error
    return logs


# The libraries of clusters are imported when they are asked for: one machine does without them.


def _start_ray(task: Task, settings: TokenizeSettings, logs: Path, tasks: int) -> None:
    import ray
    from datatrove.executor.ray import RayPipelineExecutor

    # RAY_ADDRESS names a cluster; without it this machine is one.
    ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=False)
    try:
        RayPipelineExecutor(
            pipeline=[task],
            tasks=tasks,
            cpus_per_task=settings.task_cores,
            mem_per_cpu_gb=settings.task_memory_gb,
            logging_dir=str(logs),
            skip_completed=False,  # the set itself says what is left
        ).run()
    finally:
        ray.shutdown()


def _start_slurm(task: Task, settings: TokenizeSettings, logs: Path, tasks: int) -> None:
    from datatrove.executor.slurm import SlurmPipelineExecutor

    assert settings.slurm_partition is not None, "settings refuse Slurm without a partition"
    if shutil.which("sbatch") is None:
        raise DraftmillError(
            "there is no sbatch on this host: run the same command where Slurm takes jobs, or start --shard 1/n to n/n "
            "by what this cluster has"
        )
    SlurmPipelineExecutor(
        pipeline=[task],
        tasks=tasks,
        time=settings.slurm_time,
        partition=settings.slurm_partition,
        qos="",
        cpus_per_task=settings.task_cores,
        mem_per_cpu_gb=settings.task_memory_gb,
        job_name="draftmill-tokenize",
        env_command=f"export PATH={Path(sys.executable).parent}:$PATH",
        logging_dir=str(logs),
        slurm_logs_folder=str(logs / "slurm"),
        skip_completed=False,
    ).run()
