"""The SGLang engine on real servers. Expected log-probabilities are those of a plain forward without any cache."""

import asyncio
import contextlib
import json
import shutil
import signal
from collections.abc import Iterator

import aiohttp
import numpy as np
import psutil
import pytest
import torch
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel

from impala_llm.engines.base import EngineError, Generation, SamplingParams
from impala_llm.envs.toy import CorridorSuite
from impala_llm.rollout import ChatFormat, EpisodeLimits, EpisodeSpec, play_episode
from impala_llm.trajectory import Trajectory
from tests.examples import examples
from tests.system.sglang import (
    assert_all_end,
    descendants,
    find,
    mapped_shared_files,
    needs_sglang,
    shared_files,
    without_guard,
)
from tests.system.sglang_rig import (
    EPISODES,
    MAX_LENGTH,
    TOLERANCE,
    Rig,
    has_decoded,
    picked,
    running_rig,
    start_completions,
)

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("sglang_engine"), pytest.mark.timeout(600), needs_sglang]


@pytest.fixture(scope="module")
def rig(tmp_path_factory) -> Iterator[Rig]:
    with running_rig(tmp_path_factory.mktemp("sglang")) as rig:
        yield rig


def test_log_probs_of_completions_are_those_of_the_learner(rig):
    """In episodes of several turns, before and after weights change under them and while they do: 256 completions, and
    1,024 with IMPALA_LLM_EXAMPLES=4."""
    wanted = examples(256)
    completions: list[tuple[float, list[int], Generation]] = []

    async def episode(index: int, prompt: list[int]) -> None:
        random = np.random.default_rng(index)
        name = f"turns-{index}"
        for _ in range(4):
            params = SamplingParams(
                temperature=[1.0, 0.7, 1.3][index % 3],
                max_new_tokens=int(random.integers(1, 40)),
                stop_token_ids=tuple(random.integers(0, rig.policies.vocab_size, 8).tolist()),
                greedy=index % 8 == 7,
            )
            lowest = rig.engine.version
            completion = await rig.engine.generate(name, prompt, params)
            assert lowest <= completion.versions[0] and (np.diff(completion.versions) >= 0).all()
            assert completion.versions[-1] <= rig.newest[1]
            assert (
                completion.tokens.dtype == completion.versions.dtype == np.int32
                and completion.log_probs.dtype == np.float32
            )
            stops = np.isin(completion.tokens, params.stop_token_ids)
            if completion.finish_reason == "stop":
                assert stops[-1] and stops.sum() == 1
            else:
                assert completion.finish_reason == "length" and len(completion.tokens) == params.max_new_tokens
                assert not stops.any()
            completions.append((1.0 if params.greedy else params.temperature, prompt, completion))
            prompt = [*prompt, *completion.tokens.tolist(), *random.integers(0, rig.policies.vocab_size, 9).tolist()]
        rig.engine.release(name)

    async def publish() -> None:
        """A version for every 24 completions."""
        done = 0
        while done + 24 < wanted:
            if len(completions) >= done + 24:
                done += 24
                await rig.load(rig.engine, rig.engine.version + 1)
            await asyncio.sleep(0.002)

    async def test() -> None:
        async def play() -> None:
            for batch in range(wanted // (4 * EPISODES)):
                prompts = rig.prompts(EPISODES, seed=batch)
                await asyncio.gather(*(episode(index, prompt) for index, prompt in enumerate(prompts)))

        await asyncio.gather(play(), publish())

    rig.run(test)
    assert len(completions) == wanted
    num_mixed = sum(len(set(completion.versions.tolist())) > 1 for _, _, completion in completions)
    assert num_mixed > wanted // 32
    compared = 0
    for temperature in (1.0, 0.7, 1.3):
        for model in range(len(rig.policies.models)):
            own = [
                (prompt, completion, mask)
                for theirs, prompt, completion in completions
                if theirs == temperature
                and (mask := np.array([rig.model_of(version) == model for version in completion.versions])).any()
            ]
            expected = rig.policies.learners_log_probs(model, [row[:2] for row in own], temperature)
            for (_, completion, mask), log_probs in zip(own, expected, strict=True):
                np.testing.assert_allclose(completion.log_probs[mask], log_probs[mask], rtol=0, atol=TOLERANCE)
                compared += mask.sum()
    assert compared == sum(len(completion.tokens) for _, _, completion in completions)


def test_a_greedy_completion_is_the_argmax(rig):
    async def test():
        prompt = rig.prompts(1, seed=5)[0]
        completion = await rig.engine.generate("greedy", prompt, SamplingParams(max_new_tokens=12, greedy=True))
        tokens = [*prompt, *completion.tokens.tolist()]
        model = rig.policies.models[rig.model_of(rig.engine.version)]
        with torch.no_grad():
            best = model(input_ids=torch.tensor([tokens])).logits[0].argmax(-1).tolist()
        assert best[len(prompt) - 1 : -1] == completion.tokens.tolist()

    rig.run(test)


def test_recompute_kv_makes_every_token_the_forward_of_its_version(rig):
    async def test():
        version = rig.engine.version
        prompts = rig.prompts(EPISODES, seed=1)
        completions = start_completions(rig.engine, prompts, 900)
        for step in (1, 2, 3):
            await has_decoded(rig.engine, 20 * EPISODES)
            await rig.load(rig.engine, version + step)
            assert rig.engine.version == version + step
            times = rig.engine.last_update
            assert 0 < times.transfer_s < times.pause_s
        for prompt, task in zip(prompts, completions, strict=True):
            completion = await task
            assert len(completion.tokens) == 900
            assert (np.diff(completion.versions) >= 0).all() and len(set(completion.versions.tolist())) >= 3
            rig.check(prompt, completion)
        after = await rig.engine.generate("after", prompts[0], SamplingParams(max_new_tokens=20))
        assert set(after.versions.tolist()) == {version + 3}
        rig.check(prompts[0], after)

    rig.run(test)


def test_keep_kv_goes_on_with_new_weights_over_old_keys_and_values(rig):
    @torch.no_grad()
    def expected(prompt: list[int], completion: Generation, old: PreTrainedModel, new: PreTrainedModel) -> np.ndarray:
        """Tokens are fed one by one, to the weights that sample what follows."""
        tokens = [*prompt, *completion.tokens.tolist()]
        # One token is under way when the server pauses: it is labelled new, but it is of the old weights.
        switch = len(prompt) + int((completion.versions == completion.versions[0]).sum()) + 1
        cache = DynamicCache()
        first = old(input_ids=torch.tensor([tokens[: switch - 1]]), past_key_values=cache).logits
        rest = new(input_ids=torch.tensor([tokens[switch - 1 :]]), past_key_values=cache).logits
        return picked(torch.cat([first, rest], dim=1)[0].double(), tokens, len(prompt))

    async def test():
        async with rig.second_engine("keep_kv") as engine:
            before = engine.version
            prompts = rig.prompts(EPISODES, seed=2)
            completions = start_completions(engine, prompts, 900)
            await has_decoded(engine, 40 * EPISODES)
            await rig.load(engine, before + 1)
            models = [rig.policies.models[rig.model_of(version)] for version in (before, before + 1)]
            for prompt, task in zip(prompts, completions, strict=True):
                completion = await task
                assert set(completion.versions.tolist()) == {before, before + 1}
                np.testing.assert_allclose(
                    completion.log_probs, expected(prompt, completion, *models), rtol=0, atol=TOLERANCE
                )

    rig.run(test)


def test_drain_mixes_no_versions_in_a_completion(rig):
    async def test():
        async with rig.second_engine("drain") as engine:
            before = engine.version
            prompts = rig.prompts(EPISODES, seed=3)
            early = start_completions(engine, prompts, 600)
            await has_decoded(engine, 16 * EPISODES)
            loading = asyncio.create_task(rig.load(engine, before + 1))
            while not engine.replicas[0].is_draining:
                await asyncio.sleep(0)
            late = await engine.generate("late", prompts[0], SamplingParams(max_new_tokens=8))
            assert loading.done()
            for prompt, task in zip(prompts, early, strict=True):
                completion = await task
                assert set(completion.versions.tolist()) == {before} and len(completion.tokens) == 600
                rig.check(prompt, completion)
            assert set(late.versions.tolist()) == {before + 1}
            rig.check(prompts[0], late)
            assert engine.last_update.pause_s > engine.last_update.transfer_s

    rig.run(test)


def test_wrong_directories_are_refused_and_completions_go_on(rig, tmp_path, monkeypatch):
    async def test():
        version, restarts = rig.engine.version, rig.engine.restarts
        prompts = rig.prompts(4, seed=4)
        completions = start_completions(rig.engine, prompts, 900)
        await has_decoded(rig.engine, 4 * 16)
        cut = shutil.copytree(rig.directory(version), tmp_path / "cut")
        with (cut / "model.safetensors").open("r+b") as file:
            file.truncate(5000)
        wide = tmp_path / "wide"
        config = json.loads((rig.directory(0) / "config.json").read_text())
        other = type(rig.policies.models[0].config)(**{**config, "intermediate_size": config["intermediate_size"] * 2})
        type(rig.policies.models[0])(other).save_pretrained(wide)
        for directory, said in (
            (tmp_path / "nowhere", "nowhere.*safetensors"),
            (cut, "cut"),
            (wide, "wide.*of another shape"),
        ):
            with pytest.raises(EngineError, match=said):
                await rig.engine.load_weights(directory, version + 1)
            assert rig.engine.version == version
        with pytest.raises(EngineError, match="older"):
            await rig.engine.load_weights(rig.directory(0), version - 1)
        # A directory that goes away behind our own checks: the server itself refuses it.
        monkeypatch.setattr(rig.engine.weights, "check_layout", lambda directory: None)
        with pytest.raises(EngineError, match="nowhere was refused, the old weights stay in use: http.* answered 400"):
            await rig.engine.load_weights(tmp_path / "nowhere", version + 1)
        assert (rig.engine.version, rig.engine.restarts) == (version, restarts)
        for prompt, task in zip(prompts, completions, strict=True):
            completion = await task
            assert set(completion.versions.tolist()) == {version} and len(completion.tokens) == 900
            rig.check(prompt, completion)

    rig.run(test)


def test_requests_that_would_harm_the_server_are_refused(rig):
    async def test():
        size = rig.policies.vocab_size
        for prompt, said in (
            ([1, size], f"{size}"),
            ([1, -1], "-1"),
            ([1] * MAX_LENGTH, f"max_length={MAX_LENGTH}"),
        ):
            with pytest.raises(EngineError, match=said):
                await rig.engine.generate("wrong", prompt, SamplingParams())
        nearly_full = [1] * (MAX_LENGTH - 3)
        completion = await rig.engine.generate("full", nearly_full, SamplingParams(max_new_tokens=50))
        assert completion.finish_reason == "length" and len(completion.tokens) == 3
        assert rig.engine.restarts == 0

    rig.run(test)


def test_aborted_and_cancelled_completions(rig):
    async def test():
        prompts = rig.prompts(4, seed=6)
        completions = start_completions(rig.engine, prompts, 900)
        await has_decoded(rig.engine, 4 * 20)
        rig.engine.abort("episode-0")
        completions[1].cancel()
        partial = await completions[0]
        assert partial.finish_reason == "abort" and 0 < len(partial.tokens) < 900
        with pytest.raises(asyncio.CancelledError):
            await completions[1]
        async with asyncio.timeout(10):
            while await running_requests(rig) > 2:
                await asyncio.sleep(0.02)
        rig.engine.abort()
        rig.check(prompts[0], partial)  # takes a while: a completion could end meanwhile
        for prompt, task in list(zip(prompts, completions, strict=True))[2:]:
            partial = await task
            assert partial.finish_reason == "abort" and len(partial.tokens) < 900
            rig.check(prompt, partial)
        async with asyncio.timeout(10):
            while await running_requests(rig) > 0:
                await asyncio.sleep(0.02)
        again = await rig.engine.generate("episode-0", prompts[0], SamplingParams(max_new_tokens=5))
        assert again.finish_reason == "length"

    rig.run(test)


async def running_requests(rig: Rig) -> int:
    headers = {"Authorization": f"Bearer {rig.server.key}"}
    url = f"{rig.server.url}/v1/loads?include=core"
    async with aiohttp.ClientSession() as http, http.get(url, headers=headers) as response:
        return sum(load["num_running_reqs"] for load in (await response.json())["loads"])


def test_sixteen_episodes_outlive_the_kill_of_their_server(rig):
    """Each ends once, with every token that had arrived; the server is back with the newest version."""
    suite = CorridorSuite(CorridorSuite.Options(num_turns=8))
    chat = ChatFormat(AutoTokenizer.from_pretrained(rig.policies.directories[0]))
    chat.stop_token_ids = ()  # no completion ends early: every episode is three of 300 tokens and a shorter one
    limits = EpisodeLimits(temperature=1.0, max_new_tokens=300, max_length=MAX_LENGTH)

    def play(index: int) -> asyncio.Task[Trajectory]:
        spec = EpisodeSpec(f"episode-{index}", suite.tasks("train")[index], index // 8, index, 0, "corridor", "me", "")
        return asyncio.create_task(play_episode(spec, suite.session(True), rig.engine, chat, limits))

    async def test():
        version = rig.engine.version + 1
        await rig.load(rig.engine, version)
        counted, restarts = rig.engine.stats().decode_tokens, rig.engine.restarts
        episodes = [play(index) for index in range(EPISODES)]
        completions = rig.engine.completions
        first_prompt = len(chat.first("+a"))
        while sum(len(a.tokens) >= 16 and len(a.prompt) > first_prompt for a in completions.values()) < EPISODES // 2:
            assert not any(episode.done() for episode in episodes)
            await asyncio.sleep(0.002)
        # An episode between two of its completions is not among them.
        partial = {name: (list(a.prompt), list(a.tokens), list(a.log_probs)) for name, a in completions.items()}
        kill_server(rig)
        rig.newest = (rig.directory(version + 3), version + 3)  # what the learner publishes meanwhile
        trajectories = await asyncio.gather(*episodes)
        assert [trajectory.ticket_id for trajectory in trajectories] == list(range(EPISODES))
        for trajectory in trajectories:
            prompt, tokens, log_probs = partial.get(trajectory.episode_id, ([], [], []))
            own = slice(len(prompt), len(prompt) + len(tokens))
            assert trajectory.tokens[: own.stop].tolist() == [*prompt, *tokens]
            assert trajectory.behaviour_log_probs[own].tolist() == np.float32(log_probs).tolist()
            assert set(trajectory.versions[: own.stop][trajectory.action_mask[: own.stop]].tolist()) <= {version}
            assert trajectory.newest_version in (version, version + 3)
            following = chat.following("+a", int(trajectory.tokens[-1]))
            assert trajectory.num_tokens + len(following) >= MAX_LENGTH
            assert [int(end - start) for start, end in trajectory.turns[:-1]] == [300] * 3
            for start, end in trajectory.turns:
                arrays = (trajectory.tokens, trajectory.behaviour_log_probs, trajectory.versions)
                completion = Generation(*(array[start:end] for array in arrays), finish_reason="stop")
                rig.check(trajectory.tokens[:start].tolist(), completion)
        # One whose last tokens were on their way already may have ended without the server that came back.
        assert sum(trajectory.newest_version == version + 3 for trajectory in trajectories) >= EPISODES // 2
        # No token arrived that is in no episode, and none is in two.
        sampled = sum(trajectory.num_action_tokens for trajectory in trajectories)
        assert rig.engine.stats().decode_tokens - counted == sampled
        assert rig.engine.restarts == restarts + 1 and rig.engine.version == version + 3

    rig.run(test)


def kill_server(rig: Rig) -> None:
    port = int(rig.server.url.rsplit(":", 1)[1])
    for process in descendants():
        # Others may end meanwhile, and the sockets of one that has ended are shown to root alone.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            sockets = process.net_connections("tcp")
            if any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets):
                process.send_signal(signal.SIGKILL)


def test_the_prefix_cache_never_serves_old_keys_and_values_and_the_death_of_a_part_is_noticed(tmp_path):
    """Both on one server, since a start takes long. The test before shows the death of a whole server."""
    others = descendants()
    with running_rig(tmp_path, radix_cache=True, as_remote=True) as rig:
        rig.run(lambda: completions_are_of_their_versions(rig))
        rig.run(lambda: the_longest_histories_are_answered(rig))
        tree = descendants(others)
        # What other users of the host can read.
        assert not any(rig.server.key in word for each in tree for word in each.cmdline())
        assert rig.server.settings.log.stat().st_mode & 0o077 == 0
        mapped = mapped_shared_files(tree)

        async def test():
            find(without_guard(tree), "sglang::scheduler").kill()
            # SGLang itself needs 6 s to notice the death of its scheduler.
            async with asyncio.timeout(4.0):
                assert "lost its process sglang::scheduler" in await rig.server.wait_dead()

        rig.run(test)
        assert_all_end(tree)
        assert mapped and not mapped & shared_files()
    assert descendants(others) == []


async def completions_are_of_their_versions(rig: Rig) -> None:
    """Sessions whose weights change between their turns and in the middle of them."""
    with pytest.raises(EngineError, match="--disable-radix-cache"):
        async with rig.second_engine("keep_kv"):
            raise AssertionError("this server must not be used with keep_kv")
    histories = dict(enumerate(rig.prompts(EPISODES, seed=8)))
    prompt_tokens = 0
    for turn, length in enumerate((50, 450, 350)):
        prompt_tokens += sum(map(len, histories.values()))
        completions = {
            index: asyncio.create_task(rig.engine.generate(f"{index}", tokens, SamplingParams(max_new_tokens=length)))
            for index, tokens in histories.items()
        }
        if turn:
            await has_decoded(rig.engine, 20 * EPISODES)
            await rig.load(rig.engine, turn)
        for index, task in completions.items():
            completion = await task
            rig.check(histories[index], completion)
            assert set(completion.versions.tolist()) == ({turn - 1, turn} if turn else {0})
            histories[index] = [*histories[index], *completion.tokens.tolist(), 5, 6, 7]
    assert rig.engine.stats().prefill_tokens < prompt_tokens  # the cache was of use


async def the_longest_histories_are_answered(rig: Rig) -> None:
    """Those that the server's settings promise, by the server alone, and only to who has its key."""

    async def complete(key: str, prompt: list[int], max_new_tokens: int) -> list[int]:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": max_new_tokens, "ignore_eos": True}}
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession(headers=headers, raise_for_status=True) as http,
            http.post(f"{rig.server.url}/generate", json=body) as response,
        ):
            tokens: list[int] = (await response.json())["output_ids"]
        return tokens

    assert len(await complete(rig.server.key, [5] * (MAX_LENGTH - 1), 1)) == 1
    assert len(await complete(rig.server.key, [5] * 900, MAX_LENGTH - 900)) == MAX_LENGTH - 900
    with pytest.raises(aiohttp.ClientResponseError, match="401"):
        await complete("another", [5] * 10, 1)
