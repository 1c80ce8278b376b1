"""New weights by process group (gloo) on a real SGLang server: exact in flight, and whoever dies or hangs holds up
nobody. Expected log-probabilities are those of a plain forward."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch

from impala_llm.engines.base import Generation, SamplingParams
from impala_llm.engines.sglang import process_group, weight_lock
from impala_llm.engines.sglang.engine import SGLangEngine
from impala_llm.engines.sglang.launch_args import ServerSettings
from impala_llm.engines.sglang.server import SGLangServer
from impala_llm.engines.sglang.weight_push import Sent, TransferError, WeightSender
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.publishing import VersionPublisher, send_to_servers
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader
from tests.system.runs import Run, column
from tests.system.sglang import needs_sglang, sglang_python, tiny_checkpoint
from tests.system.sglang_rig import EPISODES, MAX_LENGTH, TOLERANCE, Policies, Rig, has_decoded, start_completions

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("sglang_transfer"), pytest.mark.timeout(600), needs_sglang]

LONG = 500
"""Tokens of a completion that does not end before it should: none comes while weights are sent."""
SMALL = 1 << 16
"""Bytes of a bucket: the tiny model takes several."""


class FedRig(Rig):
    """With an engine whose weights come from a sender."""

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        return dict(PolicyModel.from_pretrained(self.directory(version)).policy_weights())

    async def send(self, sender: WeightSender, version: int) -> Sent:
        """As a learner does: first to the board, then to the servers. What fails may be loaded from there."""
        tensors = await asyncio.to_thread(self.tensors, version)
        self.newest = (self.directory(version), version)
        return await asyncio.to_thread(sender.send, self.engine.fed, tensors, version)

    async def meet(self, sender: WeightSender) -> int:
        """Send a first version, which takes longer. Returns it."""
        version = self.engine.version + 1
        assert (await self.send(sender, version)).num_received == 1
        assert await self.engine.adopt(version)
        return version

    async def lose(
        self, sender: WeightSender, version: int, event: Callable[[], None], monkeypatch: pytest.MonkeyPatch
    ) -> list[tuple[list[int], asyncio.Task[Generation]]]:
        """Send a version while completions are under way, and have `event` happen at its third bucket, so that the
        server is dropped. Returns the prompts with their completions."""
        prompts, broadcast, calls = self.prompts(EPISODES), process_group.begin_broadcast, []

        def failing(*arguments: object) -> object:
            calls.append(1)
            if len(calls) == 3:
                event()
            return broadcast(*arguments)

        completions = start_completions(self.engine, prompts, LONG)
        await has_decoded(self.engine, 20 * EPISODES)
        with monkeypatch.context() as patch:
            patch.setattr(process_group, "begin_broadcast", failing)
            sent = await self.send(sender, version)
        assert (sent.num_received, sent.num_dropped) == (0, 1)
        return list(zip(prompts, completions, strict=True))

    async def check_fresh_completions(self) -> None:
        """Log-probabilities of the newest version, against the learner's own forward."""
        completions = []
        for index, prompt in enumerate(self.prompts(4, seed=self.engine.version)):
            completion = await self.engine.generate(f"fresh-{index}", prompt, SamplingParams(max_new_tokens=30))
            assert set(completion.versions.tolist()) == {self.engine.version}
            self.engine.release(f"fresh-{index}")
            completions.append((prompt, completion))
        expected = self.policies.learners_log_probs(self.model_of(self.engine.version), completions, 1.0)
        for (_, completion), log_probs in zip(completions, expected, strict=True):
            np.testing.assert_allclose(completion.log_probs, log_probs, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FedRig]:
    root = tmp_path_factory.mktemp("transfer")
    policies = Policies(tiny_checkpoint(root / "version-0"), root)
    server = SGLangServer(
        ServerSettings(
            model=policies.directories[0],
            log=root / "server.log",
            python=sglang_python(),
            max_length=MAX_LENGTH,
            max_running=EPISODES,
        )
    )
    with asyncio.Runner() as runner:
        rig = FedRig(runner, server, None, policies, (policies.directories[0], 0))
        rig.engine = SGLangEngine(
            [server],
            vocab_size=policies.vocab_size,
            max_length=MAX_LENGTH,
            weights=lambda: contextlib.nullcontext(rig.newest),
            is_fed=True,
        )
        try:
            runner.run(rig.engine.start())
            yield rig
        finally:
            runner.run(rig.engine.close())


@pytest.fixture
def mute() -> Iterator[str]:
    """The URL of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("in_flight", ["recompute_kv", "keep_kv"])
def test_two_versions_are_sent_while_completions_run(rig: FedRig, in_flight: str) -> None:
    async def test() -> None:
        prompts = rig.prompts(EPISODES)
        rig.engine.weights.in_flight = in_flight
        with WeightSender(in_flight, key=rig.server.key, bucket_bytes=SMALL) as sender:
            first = await rig.meet(sender)
            completions = start_completions(rig.engine, prompts, LONG)
            for version in (first + 1, first + 2):
                await has_decoded(rig.engine, 20 * EPISODES)
                sent = await rig.send(sender, version)
                assert (sent.num_received, sent.num_dropped) == (1, 0)
                assert 0 < sent.transfer_s < sent.pause_s
                assert rig.engine.version == version - 1
                assert await rig.engine.adopt(version)
                assert rig.engine.version == version
            for prompt, completion in zip(prompts, await asyncio.gather(*completions), strict=True):
                assert set(completion.versions.tolist()) == {first, first + 1, first + 2}
                if in_flight == "recompute_kv":
                    rig.check(prompt, completion)
            await rig.check_fresh_completions()

    try:
        rig.run(test)
    finally:
        rig.engine.weights.in_flight = "recompute_kv"


@pytest.mark.parametrize("source", ["model", "board"])
def test_a_version_that_is_published_before_it_is_due_is_sent_too(rig: FedRig, tmp_path: Path, source: str) -> None:
    """As all others by the process group, from the model or from what lies on the board: the actor loads nothing."""

    async def test() -> None:
        version = rig.engine.version + 1
        model = PolicyModel.from_pretrained(rig.directory(version))
        boards = [WeightPublisher(tmp_path / name) for name in ("board", "kept")]
        publisher = VersionPublisher(Ranks("cpu"), model, *boards, interval=100, max_staleness=None)
        publisher.begin(version - 1)
        receiver = Mock(**{"needs_weights.return_value": True})
        with WeightSender("recompute_kv", key=rig.server.key) as sender:
            reader = WeightReader(tmp_path / "board") if source == "board" else None
            publisher.transports.append(partial(send_to_servers, sender, lambda: rig.engine.fed, board=reader))
            metrics = await asyncio.to_thread(publisher.publish_early, version, receiver, lambda: False)
            assert metrics["weights/servers_sent"] == 1.0 and metrics["weights/servers_dropped"] == 0.0
            receiver.announce_late.assert_called_once_with(version)
            assert await rig.engine.adopt(version)
            rig.newest = (rig.directory(version), version)
            await rig.check_fresh_completions()

    rig.run(test)


def test_a_server_that_hangs_costs_one_timeout_and_the_other_goes_on(rig: FedRig, mute: str, caplog) -> None:
    async def test() -> None:
        with WeightSender("recompute_kv", key=rig.server.key, timeout_s=8) as sender:
            version = rig.engine.version
            for dropped in (1, 0):
                version += 1
                servers = {**rig.engine.fed, 77: mute}
                sent = await asyncio.to_thread(sender.send, servers, rig.tensors(version), version)
                assert (sent.num_received, sent.num_dropped) == (1, dropped)
                rig.newest = (rig.directory(version), version)
                assert await rig.engine.adopt(version)
                await rig.check_fresh_completions()

    rig.run(test)
    assert caplog.text.count(mute) == 1


def test_no_token_comes_from_a_part_of_a_version(rig: FedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer breaks off in the middle: the server stands still until it has a whole version, from disk."""

    def break_off() -> None:
        raise TransferError("broken off")

    async def test() -> None:
        with WeightSender("recompute_kv", key=rig.server.key, timeout_s=20, bucket_bytes=SMALL) as sender:
            first = await rig.meet(sender)
            before = rig.engine.fed
            episodes = await rig.lose(sender, first + 1, break_off, monkeypatch)
            assert not await rig.engine.adopt(first + 1)
            # Until it comes back under another number it is let alone.
            assert await asyncio.to_thread(sender.send, before, rig.tensors(first + 1), first + 1) == Sent()
            await rig.engine.load_weights(*rig.newest)
            for prompt, completion in episodes:
                assert set((await completion).versions.tolist()) == {first, first + 1}
                rig.check(prompt, await completion)
            assert rig.engine.fed.keys() != before.keys()
            assert (await rig.send(sender, first + 2)).num_received == 1
            assert await rig.engine.adopt(first + 2)
            await rig.check_fresh_completions()

    rig.run(test)


def test_what_a_killed_learner_left_behind_is_put_right(rig: FedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is paused, with its session open: a new sender does not touch it, and its actor claims it back."""
    monkeypatch.setattr(weight_lock, "PATIENCE_S", 0.5)

    async def test() -> None:
        version = rig.engine.version + 1
        client = rig.engine.replicas[0].client
        [completion] = start_completions(rig.engine, rig.prompts(1), LONG)
        await has_decoded(rig.engine, 20)
        await client.pause("retract")
        await client.begin_update()
        with WeightSender("recompute_kv", key=rig.server.key, timeout_s=20) as sender:
            assert (await rig.send(sender, version)).num_dropped == 1
            assert await client.weight_version() == version - 1

            class Lease:
                path = rig.directory(version)

            Lease.version = version
            await rig.engine.reclaim(Lease)
            assert set((await completion).versions.tolist()) == {version - 1, version}
            assert (await rig.send(sender, version + 1)).num_received == 1
        assert await rig.engine.adopt(version + 1)
        await rig.check_fresh_completions()

    rig.run(test)


def test_a_server_killed_in_the_middle_of_a_transfer(rig: FedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner is held up for no longer than its timeout; completions go on when the server is back; so do sends."""

    def kill_server() -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends by itself once its parent is killed
                # Its guard, which waits for it, stays.
                if process.ppid() != os.getpid():
                    process.kill()

    async def test() -> None:
        with WeightSender("recompute_kv", key=rig.server.key, timeout_s=15, bucket_bytes=SMALL) as sender:
            first = await rig.meet(sender)
            episodes = await rig.lose(sender, first + 1, kill_server, monkeypatch)
            for prompt, completion in episodes:
                assert set((await completion).versions.tolist()) == {first, first + 1}
                rig.check(prompt, await completion)
            assert rig.engine.version == first + 1  # at its handshake
            assert (await rig.send(sender, first + 2)).num_received == 1
            assert await rig.engine.adopt(first + 2)
            await rig.check_fresh_completions()

    rig.run(test)


def test_a_run_whose_learner_sends(tmp_path: Path) -> None:
    """Its servers play validation tasks beside training. That these are played greedily, test_sglang_engine.py and
    tests/evaluation/test_episodes.py show."""
    settings = ("experiment=toy", "engine=sglang", "engine.transfer=distributed", f"engine.python={sglang_python()}")
    sizes = ("actor.num_actors=1", "actor.max_episodes=16", "learner.total_updates=8")
    with Run(tmp_path, *settings, *sizes, "evaluation.every_updates=4", "evaluation.run_tasks=20") as run:
        assert run.train().wait(400) == 0, run.printed()
        run.assert_gone()
        found = [row for row in run.rows() if row.get("evaluation/episodes") is not None]
        versions = column(found, "evaluation/version")
        assert versions[0] == 0 and versions[-1] == 8 and versions == sorted(set(versions))
        assert column(found, "evaluation/episodes") == [20.0] * len(found)
        rows = [row for row in run.rows() if "loss/total" in row]  # the last evaluation has a row of its own
        assert len(rows) == 8
        assert column(rows, "weights/servers_sent")[2:] == [1.0] * 6  # the first may come before the first offer
        assert sum(column(rows, "weights/servers_dropped")) == 0
        assert column(rows, "mismatch/logprob_max") and max(column(rows, "mismatch/logprob_max")) < 1e-3
        assert 0 < column(rows, "weights/transfer_s")[-1] < column(rows, "weights/pause_s")[-1]
        for name in ("refused", "duplicates", "regranted", "expired", "malformed"):
            assert sum(column(rows, f"pipeline/{name}")) == 0, name
        assert sum(column(rows, "actor/failed_episodes")) == 0
