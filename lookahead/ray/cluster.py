"""The Ray cluster at hand, and how much of it a replica asks for."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jacobi import LookaheadError


@contextmanager
def connected(quiet: bool = True) -> Iterator[Any]:
    """Ray's module, connected to the cluster that ``RAY_ADDRESS`` names, or to one that is started on this machine and
    ends with the block. ``quiet`` leaves what actors print to Ray's logs."""
    ray = ray_of()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray would make a new environment for its workers where the program was started by uv.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    if quiet:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        logging.getLogger("ray.data").setLevel(logging.WARNING)
    if ray.is_initialized():
        yield ray
        return
    ray.init(include_dashboard=False, log_to_driver=not quiet, logging_level="warning")
    try:
        yield ray
    finally:
        ray.shutdown()


def ray_of() -> Any:
    """Ray's module, with what serves and what batches need."""
    try:
        import ray
        import ray.data
        import ray.serve
    except ImportError as error:
        raise LookaheadError('Replicas need Ray: pip install "lookahead-decoding[ray]".') from error
    return ray


def share(ray: Any, replicas: int) -> dict[str, float]:
    """Resources of each of some replicas: an even part of the processors, of which one stays free for Ray's own
    tasks, and of the GPUs, if there are any; whole ones where there are enough."""
    there = ray.cluster_resources()
    found = {"num_cpus": _part(max(0.5, there.get("CPU", 1.0) - 1), replicas)}
    gpus = _part(there.get("GPU", 0.0), replicas)
    return found | ({"num_gpus": gpus} if gpus else {})


def _part(of: float, replicas: int) -> float:
    each = of / replicas
    return float(int(each)) if each >= 1 else int(each * 100) / 100
