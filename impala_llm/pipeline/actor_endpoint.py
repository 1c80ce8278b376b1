"""An actor's end of the pipeline in one object: tickets in, trajectories out, weights to read."""

from __future__ import annotations

import hashlib
import platform
import re
from pathlib import Path

from impala_llm.hosts import rank_endpoint
from impala_llm.pipeline.network.keys import load_actor_keys
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.learner_connection import ChannelTimes, Context
from impala_llm.pipeline.transport.rank_channels import ActorChannels
from impala_llm.pipeline.weights.board import WeightReader
from impala_llm.settings import Config


class ActorEndpoint:
    """Connections of an actor to all ranks of the learner of `run.name`, here or where `pipeline.connect` says.

    Args:
        actor_id: unique among all actors of the run.

    Raises:
        RunDirectoryError: no learner of this run has come within `pipeline.learner_timeout_s`.
    """

    def __init__(self, config: Config, actor_id: str) -> None:
        self._config, self._actor_id = config, actor_id
        self._run_dir = run_dir = RunDirectory.attach(config.run.name, timeout_s=config.pipeline.learner_timeout_s)
        self.weights = WeightReader(run_dir.weights_path)
        """Versions on this host's board, the learner's own or the one that a relay fills."""
        self.server_key = run_dir.server_key
        """API key of this run's SGLang servers."""

    def connect(self) -> ActorChannels:
        """The channel for tickets, trajectories and announcements. Its `close` is the caller's task.

        Raises:
            KeyFileError: `pipeline.keys` names files that cannot be used.
        """
        return ActorChannels(self._connect, self._config.learner.num_ranks)

    def _connect(self, rank: int, context: Context) -> ActorChannel:
        pipeline = self._config.pipeline
        remote = pipeline.connect and rank_endpoint(pipeline.connect, rank)
        return ActorChannel(
            remote or self._run_dir.endpoint(rank),
            self._actor_id,
            None if remote else self._run_dir,
            arena_bytes=(pipeline.arena_mb << 20) // self._config.learner.num_ranks,
            keys=load_actor_keys(Path(pipeline.keys).expanduser()) if remote and pipeline.keys else None,
            times=ChannelTimes(pipeline.heartbeat_s, learner_timeout_s=pipeline.learner_timeout_s),
            arena_name=f"{self._actor_id}.rank-{rank}",
            context=context,
        )


def actor_name(config: Config, index: int) -> str:
    """Make a name that is unique among all actors of a run: hosts number theirs from 0."""
    if config.pipeline.connect is None:
        return f"actor-{index}"
    node = platform.node()
    host = re.sub(r"[^A-Za-z0-9-]", "-", node).strip("-")[:32]
    if not host or host != node:
        # What was left out may be all that tells two hosts apart.
        host = f"{host[:23] or 'host'}-{hashlib.sha256(node.encode()).hexdigest()[:8]}"
    return f"{host}-actor-{index}"
