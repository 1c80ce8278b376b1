"""Assigns the GPUs of a host to the learner's ranks and the actors."""

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from impala_llm.config import ConfigError
from impala_llm.settings import Config


@dataclass(frozen=True)
class GpuShares:
    """learner: one GPU for each rank, in their order. actors: of each actor. Empty where none are needed, or there are
    none: such a process keeps its environment as it is."""

    learner: list[str]
    actors: list[list[str]]


def visible_gpus() -> list[str]:
    """GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; empty without."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        # CUDA ends its list at the first name that is not a device.
        return list(takewhile(lambda name: name not in ("", "-1"), map(str.strip, named.split(","))))
    # torch would know as well, and cost seconds and gigabytes in every supervisor.
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    listed = subprocess.run([tool, "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True)
    return listed.stdout.split() if listed.returncode == 0 else []


def deal_gpus(config: Config, gpus: Sequence[str]) -> GpuShares:
    """The learner's ranks have the first GPUs, where the learner is on this host; the actors have the others.

    A learner is on this host unless `pipeline.connect` names another one. Each SGLang server has
    `engine.tensor_parallel` GPUs of its own. Embedded engines share GPUs where there are too few, and the learner's
    where it leaves none.

    Args:
        gpus: that may be used on this host, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        ConfigError: too few for the learner's ranks, or for the servers.
    """
    engine, num_actors = config.engine, config.num_actors
    if not gpus or (config.model.device == "cpu" and engine.name != "sglang"):
        return GpuShares([], [[] for _ in range(num_actors)])
    num_ranks = _num_ranks_here(config)
    if len(gpus) < num_ranks:
        width = config.learner.tensor_parallel
        needed = "as many GPUs" if width == 1 else f"learner.tensor_parallel={width} GPUs each"
        raise ConfigError(
            f"learner.num_ranks={config.learner.num_ranks} needs {needed}, and this host has {len(gpus)}: set "
            f"learner.num_ranks={max(1, len(gpus) // width)} or model.device=cpu"
        )
    learner, free = list(gpus[:num_ranks]), list(gpus[num_ranks:])
    if engine.urls is not None:
        return GpuShares(learner, [[] for _ in range(num_actors)])
    if engine.name != "sglang":
        shared = free or learner
        return GpuShares(learner, [[shared[index % len(shared)]] for index in range(num_actors)])
    each = engine.tensor_parallel
    if len(free) < num_actors * each:
        others = f", {num_ranks} of them for learner.num_ranks={num_ranks}" if num_ranks else ""
        raise ConfigError(
            f"actor.num_actors={num_actors} servers of engine.tensor_parallel={each} need {num_actors * each} GPUs, "
            f"and this host has {len(gpus)}{others}: lower one of these settings"
        )
    return GpuShares(learner, [free[index * each : (index + 1) * each] for index in range(num_actors)])


def with_num_actors(config: Config, words: Sequence[str], gpus: Sequence[str]) -> tuple[Config, list[str]]:
    """Settings, and the words that they are of, with the number of actors where the user set none: one for each server
    of `engine.urls`, or for which there are GPUs beside the learner's; at least one."""
    if config.engine.name != "sglang" or config.actor.num_actors is not None:
        return config, list(words)
    free = len(gpus) - _num_ranks_here(config)
    number = max(1, len(config.engine.urls or ()) or free // config.engine.tensor_parallel)
    settled = dataclasses.replace(config, actor=dataclasses.replace(config.actor, num_actors=number))
    return settled, [*words, f"actor.num_actors={number}"]


def _num_ranks_here(config: Config) -> int:
    """Number of learner processes that need a GPU on this host."""
    return config.learner.num_processes if config.pipeline.connect is None and config.model.device != "cpu" else 0
