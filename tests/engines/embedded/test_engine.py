import asyncio
import copy
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen3Config

from impala_llm.engines.base import EngineError, Generation, ModelRefused, SamplingParams
from impala_llm.engines.embedded import engine
from impala_llm.engines.embedded.decoder import CompactDecoder, CpuDecoder, Decoder, HuggingFaceDecoder, make_decoder
from impala_llm.engines.embedded.engine import TorchEngine
from impala_llm.learning.policy.model import PolicyModel

MakeModel = Callable[..., PreTrainedModel]


def random_tokens(count: int, seed: int, vocab_size: int = 211) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


async def play(engine: TorchEngine, name: str, seed: int, params: SamplingParams, turns: int = 3) -> list:
    """An episode of several turns: [(history before the completion, completion)]."""
    rng = np.random.default_rng(seed)
    history: list[int] = []
    completions = []
    for _ in range(turns):
        history = history + rng.integers(0, engine.vocab_size, int(rng.integers(1, 90))).tolist()
        completion = await engine.generate(name, history, params)
        completions.append((history, completion))
        history = history + completion.tokens.tolist()
    engine.release(name)
    return completions


def test_each_model_gets_the_fastest_decoder_that_computes_it(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    kinds = {kind: type(make_decoder(make_model(kind), 64)) for kind in ("qwen3", "qwen2", "llama", "mistral")}
    assert kinds == {"qwen3": CpuDecoder, "qwen2": CpuDecoder, "llama": CpuDecoder, "mistral": HuggingFaceDecoder}
    assert type(make_decoder(make_model("qwen3").to(torch.bfloat16), 64)) is CompactDecoder
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert type(make_decoder(make_model("qwen3"), 64)) is CompactDecoder


@pytest.fixture(params=[CpuDecoder, CompactDecoder])
def compact_decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type:
    """The decoder of the models that both know."""

    def make(model: PreTrainedModel, max_length: int) -> Decoder:
        return HuggingFaceDecoder(model) if model.config.model_type == "mistral" else request.param(model, max_length)

    monkeypatch.setattr(engine, "make_decoder", make)
    return request.param


@pytest.mark.usefixtures("compact_decoder")
@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("qwen3", SamplingParams(max_new_tokens=20, seed=3)),
        ("qwen3", SamplingParams(max_new_tokens=20, seed=3, temperature=0.7)),
        ("qwen2", SamplingParams(max_new_tokens=9, seed=4, temperature=1.3)),
        ("llama", SamplingParams(max_new_tokens=9, greedy=True, temperature=0.5)),
        ("mistral", SamplingParams(max_new_tokens=9, seed=5, temperature=0.7)),
    ],
)
def test_uneven_episodes_of_several_turns_agree_with_a_plain_forward(
    make_model: MakeModel, plain_log_probs: Callable, kind: str, params: SamplingParams
) -> None:
    model = make_model(kind)
    reference = copy.deepcopy(model)
    # Fewer slots than episodes, and a budget below the longest prompts: episodes wait, prompts come in parts.
    engine = TorchEngine(model, max_sessions=5, max_length=400, prefill_budget=70)

    async def episodes() -> list:
        return await asyncio.gather(*[play(engine, f"e{i}", i, params) for i in range(7)])

    for completions in asyncio.run(episodes()):
        for history, completion in completions:
            assert completion.finish_reason == "length"
            assert len(completion.tokens) == params.max_new_tokens
            temperature = 1.0 if params.greedy else params.temperature
            expected = plain_log_probs(reference, history + completion.tokens.tolist(), len(history), temperature)
            np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)
            assert (completion.versions == 0).all()


def test_greedy_takes_the_most_likely_tokens(make_model: MakeModel) -> None:
    model = make_model("qwen3")
    reference = copy.deepcopy(model)
    prompt = random_tokens(30, 1)
    engine = TorchEngine(model, max_sessions=1, max_length=100)
    completion = asyncio.run(engine.generate("a", prompt, SamplingParams(max_new_tokens=12, greedy=True)))
    expected = list(prompt)
    for _ in range(12):
        with torch.no_grad():
            expected.append(int(reference(torch.tensor([expected])).logits[0, -1].argmax()))
    assert completion.tokens.tolist() == expected[30:]


def test_no_prefix_is_computed_twice(make_model: MakeModel) -> None:
    engine = TorchEngine(make_model("qwen3"), max_sessions=3, max_length=400, prefill_budget=64)
    params = SamplingParams(max_new_tokens=11, seed=1)

    async def episodes() -> list:
        return await asyncio.gather(*[play(engine, f"e{i}", i, params) for i in range(6)])

    new_tokens = 0
    for completions in asyncio.run(episodes()):
        cached = 0
        for history, completion in completions:
            new_tokens += len(history) - cached
            # The last sampled token never went through the model: the next turn computes it.
            cached = len(history) + len(completion.tokens) - 1
    assert engine.stats().prefill_tokens == new_tokens
    assert engine.stats().decode_tokens == 6 * 3 * 11


@pytest.mark.usefixtures("compact_decoder")
def test_few_running_sessions_among_many_idle_ones(make_model: MakeModel, plain_log_probs: Callable) -> None:
    model = make_model("qwen3")
    reference = copy.deepcopy(model)
    engine = TorchEngine(model, max_sessions=12, max_length=256)
    prompts = {f"e{i}": random_tokens(70 + i, i) for i in range(12)}
    params = SamplingParams(max_new_tokens=1)

    async def run() -> Generation:
        firsts = await asyncio.gather(*[engine.generate(name, prompt, params) for name, prompt in prompts.items()])
        prompts["e9"] += [*firsts[9].tokens.tolist(), 5, 6, 7]
        return await engine.generate("e9", prompts["e9"], SamplingParams(max_new_tokens=80))

    completion = asyncio.run(run())
    expected = plain_log_probs(reference, prompts["e9"] + completion.tokens.tolist(), len(prompts["e9"]))
    np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)


@pytest.mark.usefixtures("compact_decoder")
def test_weights_change_between_two_steps_of_a_completion(make_model: MakeModel) -> None:
    old, new = make_model("qwen3", seed=0), make_model("qwen3", seed=1)
    engine = TorchEngine(copy.deepcopy(old), max_sessions=1, max_length=128, version=4)
    prompt = random_tokens(20, 2)
    drawn_before = 0

    async def run() -> Generation:
        nonlocal drawn_before
        task = asyncio.ensure_future(engine.generate("a", prompt, SamplingParams(max_new_tokens=15, seed=6)))
        while engine.stats().decode_tokens < 6:
            await asyncio.sleep(0)
        drawn_before = engine.stats().decode_tokens
        engine.load_state(new.state_dict(), version=7)
        return await task

    completion = asyncio.run(run())
    assert completion.versions.tolist() == [4] * drawn_before + [7] * (15 - drawn_before)
    assert engine.version == 7
    # Old weights until the swap, then the new ones on the old keys and values ("keep_kv").
    cache = DynamicCache()
    fed = prompt + completion.tokens.tolist()
    with torch.no_grad():
        logits = old(torch.tensor([prompt]), past_key_values=cache, use_cache=True).logits[0, -1]
        for i, token in enumerate(completion.tokens.tolist()):
            assert abs(logits.log_softmax(-1)[token].item() - completion.log_probs[i]) < 1e-4
            model = old if i + 1 < drawn_before else new
            step = torch.tensor([[fed[len(prompt) + i]]])
            logits = model(step, past_key_values=cache, use_cache=True).logits[0, -1]


def test_times_of_a_load_are_those_of_the_latest_one(make_model: MakeModel) -> None:
    engine = TorchEngine(make_model("qwen3", seed=0), max_sessions=1, max_length=128)
    for version in (1, 2):
        state = make_model("qwen3", seed=version).state_dict()
        begin = time.perf_counter()
        engine.load_state(state, version)
        elapsed, stats = time.perf_counter() - begin, engine.stats()
        assert 0 < stats.transfer_seconds <= stats.pause_seconds <= elapsed


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_weights_from_a_directory(make_model: MakeModel, tmp_path, plain_log_probs: Callable, kind: str) -> None:
    new = make_model(kind, seed=1)
    new.save_pretrained(tmp_path)
    engine = TorchEngine(make_model(kind, seed=0), max_sessions=1, max_length=128)
    prompt = random_tokens(20, 2)

    async def run() -> Generation:
        await engine.load_weights(tmp_path, version=1)
        return await engine.generate("a", prompt, SamplingParams(max_new_tokens=5))

    completion = asyncio.run(run())
    expected = plain_log_probs(new, prompt + completion.tokens.tolist(), len(prompt))
    np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)
    assert completion.versions.tolist() == [1] * 5


def test_an_engine_from_a_directory(make_model: MakeModel, tmp_path, plain_log_probs: Callable) -> None:
    model = make_model("qwen3")
    model.save_pretrained(tmp_path)
    engine = TorchEngine.from_pretrained(tmp_path, max_sessions=1, max_length=64)
    assert engine.vocab_size == 211
    prompt = random_tokens(20, 2)
    completion = asyncio.run(engine.generate("a", prompt, SamplingParams(max_new_tokens=5)))
    expected = plain_log_probs(model, prompt + completion.tokens.tolist(), len(prompt))
    np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)
    with pytest.raises(EngineError, match=r"nowhere: no config\.json"):
        TorchEngine.from_pretrained(tmp_path / "nowhere", max_sessions=1, max_length=64)


def test_a_directory_that_lacks_weights_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    state = make_model("qwen2").state_dict()
    make_model("qwen2").save_pretrained(
        tmp_path, state_dict={name: state[name] for name in state if "lm_head" not in name}
    )
    with pytest.raises(ModelRefused, match=f"model.path={tmp_path} lacks weights .*: lm_head.weight;"):
        TorchEngine.from_pretrained(tmp_path, max_sessions=1, max_length=64)


def test_bfloat16_weights_are_close(make_model: MakeModel, plain_log_probs: Callable) -> None:
    model = make_model("qwen3")
    reference = copy.deepcopy(model)
    engine = TorchEngine(model.to(torch.bfloat16), max_sessions=1, max_length=64)
    prompt = random_tokens(20, 2)
    completion = asyncio.run(engine.generate("a", prompt, SamplingParams(max_new_tokens=10)))
    expected = plain_log_probs(reference, prompt + completion.tokens.tolist(), len(prompt))
    assert np.abs(completion.log_probs - expected).mean() < 0.3


@pytest.mark.system
def test_engine_and_learner_agree_in_bfloat16_where_logits_are_large(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**shape, **heads))
    with torch.no_grad():
        model.lm_head.weight *= 60.0  # a logit of 40 has an error of 0.08 once it is rounded to bfloat16
    model.save_pretrained(tmp_path)
    policy = PolicyModel.from_pretrained(tmp_path)
    policy.compute_in("bfloat16")
    engine = TorchEngine(model.to(torch.bfloat16), max_sessions=1, max_length=256)
    completion = asyncio.run(engine.generate("a", list(range(20)), SamplingParams(max_new_tokens=200)))
    row = torch.tensor([*range(20), *completion.tokens])
    with torch.no_grad():
        hidden = policy.hidden(row, torch.arange(len(row)), torch.tensor([len(row)])).view(len(row), -1)
        expected = policy.action_log_probs(hidden[19:-1], row[20:], 1.0)[0].numpy()
        assert policy.logits(hidden).abs().max() > 30
    assert np.abs(completion.log_probs - expected).mean() < 0.025


def test_refused_weights_leave_the_old_ones_in_use(make_model: MakeModel, tmp_path) -> None:
    engine = TorchEngine(make_model("qwen3"), max_sessions=1, max_length=128, version=2)
    params = SamplingParams(max_new_tokens=8, greedy=True)
    prompt = random_tokens(20, 2)
    other_shape = make_model("qwen3", vocab_size=300)
    other_shape.save_pretrained(tmp_path / "shape")
    (tmp_path / "corrupt").mkdir()
    (tmp_path / "corrupt" / "model.safetensors").write_bytes(b"\xff" * 100)

    async def run() -> None:
        before = await engine.generate("a", prompt, params)
        engine.release("a")
        with pytest.raises(EngineError, match=r"another shape: model\.embed_tokens\.weight is \[300, 32\]"):
            await engine.load_weights(tmp_path / "shape", 3)
        with pytest.raises(EngineError, match=r"cannot read the weights .*absent"):
            await engine.load_weights(tmp_path / "absent", 3)
        with pytest.raises(EngineError, match=r"cannot read the weights .*corrupt"):
            await engine.load_weights(tmp_path / "corrupt", 3)
        with pytest.raises(EngineError, match=r"35 missing: model\.embed_tokens\.weight, .*; 1 unknown: extra"):
            engine.load_state({"extra": torch.zeros(1)}, 3)
        with pytest.raises(EngineError, match="version 1 is older than the engine's 2"):
            await engine.load_weights(tmp_path / "shape", 1)
        after = await engine.generate("a", prompt, params)
        assert after.tokens.tolist() == before.tokens.tolist()
        assert after.versions.tolist() == [2] * 8

    asyncio.run(run())


def test_abort_keeps_what_was_sampled_and_the_completion_can_go_on(make_model: MakeModel) -> None:
    prompt = random_tokens(40, 2)
    whole = asyncio.run(
        TorchEngine(make_model("qwen3"), max_sessions=1, max_length=128).generate(
            "a", prompt, SamplingParams(max_new_tokens=20, seed=9)
        )
    )
    engine = TorchEngine(make_model("qwen3"), max_sessions=1, max_length=128)

    async def run() -> tuple[Generation, Generation, Generation]:
        first = asyncio.ensure_future(engine.generate("a", prompt, SamplingParams(max_new_tokens=20, seed=9)))
        waiting = asyncio.ensure_future(engine.generate("b", prompt, SamplingParams()))
        while engine.stats().decode_tokens < 8:
            await asyncio.sleep(0)
        assert engine.stats().waiting == 1
        engine.abort()
        partial = await first
        rest = SamplingParams(max_new_tokens=20 - len(partial.tokens), seed=9)
        return partial, await waiting, await engine.generate("a", prompt + partial.tokens.tolist(), rest)

    partial, never_begun, rest = asyncio.run(run())
    assert (partial.finish_reason, len(partial.tokens)) == ("abort", 8)
    assert len(partial.log_probs) == len(partial.versions) == 8
    assert (never_begun.finish_reason, len(never_begun.tokens)) == ("abort", 0)
    assert partial.tokens.tolist() + rest.tokens.tolist() == whole.tokens.tolist()
    np.testing.assert_allclose(np.concatenate([partial.log_probs, rest.log_probs]), whole.log_probs, atol=1e-5)
    assert engine.stats().prefill_tokens == 40 + 1


def test_a_cancelled_caller_leaves_the_engine_usable(make_model: MakeModel) -> None:
    engine = TorchEngine(make_model("qwen3"), max_sessions=1, max_length=128)
    prompt = random_tokens(40, 2)

    async def run() -> None:
        running = asyncio.ensure_future(engine.generate("a", prompt, SamplingParams(max_new_tokens=80)))
        waiting = asyncio.ensure_future(engine.generate("b", prompt, SamplingParams(max_new_tokens=80)))
        while engine.stats().decode_tokens < 3:
            await asyncio.sleep(0)
        running.cancel()
        waiting.cancel()
        results = await asyncio.gather(running, waiting, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)
        assert len((await engine.generate("a", prompt, SamplingParams(max_new_tokens=4))).tokens) == 4

    asyncio.run(run())


def test_a_stop_token_ends_the_completion_and_belongs_to_it(make_model: MakeModel) -> None:
    prompt = random_tokens(40, 2)

    def complete(stop: tuple[int, ...]) -> Generation:
        engine = TorchEngine(make_model("qwen3"), max_sessions=1, max_length=128)
        return asyncio.run(engine.generate("a", prompt, SamplingParams(max_new_tokens=30, seed=2, stop_token_ids=stop)))

    free = complete(())
    stop = int(free.tokens[10])
    first = free.tokens.tolist().index(stop)
    unused = next(token for token in range(211) if token not in free.tokens)
    stopped = complete((unused, stop))
    assert stopped.finish_reason == "stop"
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()


@pytest.mark.usefixtures("compact_decoder")
def test_tokens_do_not_depend_on_who_shares_the_batch(make_model: MakeModel) -> None:
    async def run(others: int) -> list:
        engine = TorchEngine(make_model("qwen3"), max_sessions=8, max_length=400, seed=1)
        episodes = [play(engine, "mine", 100, SamplingParams(max_new_tokens=15, seed=77))]
        episodes += [play(engine, f"o{i}", i, SamplingParams(max_new_tokens=9, seed=i)) for i in range(others)]
        return (await asyncio.gather(*episodes))[0]

    for (_, alone), (_, together) in zip(asyncio.run(run(0)), asyncio.run(run(6)), strict=True):
        assert alone.tokens.tolist() == together.tokens.tolist()
        np.testing.assert_allclose(alone.log_probs, together.log_probs, atol=1e-5)


@pytest.mark.usefixtures("compact_decoder")
def test_the_same_calls_give_the_same_bits_and_another_seed_other_tokens(make_model: MakeModel) -> None:
    async def run(seed: int) -> list:
        engine = TorchEngine(make_model("qwen3"), max_sessions=3, max_length=400, seed=seed, prefill_budget=50)
        params = SamplingParams(max_new_tokens=10, seed=5)
        return await asyncio.gather(*[play(engine, f"e{i}", i, params) for i in range(5)])

    first, again, other = (asyncio.run(run(seed)) for seed in (1, 1, 2))
    for one, two in zip(first, again, strict=True):
        for (_, a), (_, b) in zip(one, two, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.log_probs.tobytes() == b.log_probs.tobytes()
    assert first[0][0][1].tokens.tolist() != other[0][0][1].tokens.tolist()


def test_first_tokens_are_drawn_from_the_softmax(make_model: MakeModel) -> None:
    vocab_size, draws, temperature = 12, 1500, 0.7
    model = make_model("qwen3", vocab_size=vocab_size)
    with torch.no_grad():
        model.model.norm.weight.mul_(0.3)
        logits = copy.deepcopy(model)(torch.tensor([[3, 1, 2]])).logits[0, -1]
    engine = TorchEngine(model, max_sessions=50, max_length=16)

    async def one(seed: int) -> int:
        params = SamplingParams(max_new_tokens=1, seed=seed, temperature=temperature)
        completion = await engine.generate(str(seed), [3, 1, 2], params)
        engine.release(str(seed))
        return int(completion.tokens[0])

    async def run() -> list[int]:
        return await asyncio.gather(*[one(seed) for seed in range(draws)])

    counts = np.bincount(asyncio.run(run()), minlength=vocab_size)
    expected = draws * torch.softmax(logits.double() / temperature, -1).numpy()
    statistic = ((counts - expected) ** 2 / expected).sum()
    # 99.99 % quantile of chi-square with 11 degrees of freedom.
    assert statistic < 37.4


def test_a_session_without_slot_waits_for_a_release(make_model: MakeModel) -> None:
    engine = TorchEngine(make_model("qwen3"), max_sessions=2, max_length=64)
    params = SamplingParams(max_new_tokens=3)

    async def run() -> None:
        await asyncio.gather(engine.generate("a", [1, 2], params), engine.generate("b", [1, 2], params))
        late = asyncio.ensure_future(engine.generate("c", [1, 2], params))
        await asyncio.sleep(0)
        assert engine.stats().waiting == 1
        engine.release("b")
        assert (await late).finish_reason == "length"

    asyncio.run(run())


def test_a_completion_without_room_ends_at_max_length(make_model: MakeModel) -> None:
    engine = TorchEngine(make_model("qwen3"), max_sessions=1, max_length=70)
    completion = asyncio.run(engine.generate("a", random_tokens(66, 1), SamplingParams(max_new_tokens=50)))
    assert (completion.finish_reason, len(completion.tokens)) == ("length", 4)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "prompt has shape"),
        ([1.5, 2.0], SamplingParams(), "dtype float64"),
        ([1, 2, 211], SamplingParams(), r"prompt\[2\] is 211: token ids of this model lie in 0 \.\. 210"),
        ([1, -1], SamplingParams(), r"prompt\[1\] is -1"),
        ([1] * 64, SamplingParams(), "64 tokens: with max_length=64 there is no room"),
        ([1], SamplingParams(stop_token_ids=(211,)), "stop_token_ids"),
        ([1], SamplingParams(stop_token_ids=tuple(range(17))), "at most 16"),
    ],
)
def test_a_bad_request_is_refused_and_the_engine_goes_on(
    make_model: MakeModel, prompt: list, params: SamplingParams, message: str
) -> None:
    engine = TorchEngine(make_model("qwen3"), max_sessions=1, max_length=64)

    async def run() -> None:
        good = asyncio.ensure_future(engine.generate("good", [1, 2, 3], SamplingParams(max_new_tokens=5)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match=message):
            await engine.generate("bad", prompt, params)
        assert len((await good).tokens) == 5

    asyncio.run(run())


def test_a_session_answers_one_request_at_a_time_on_a_history_that_only_grows(make_model: MakeModel) -> None:
    engine = TorchEngine(make_model("qwen3"), max_sessions=1, max_length=64)
    params = SamplingParams(max_new_tokens=5)

    async def run() -> None:
        running = asyncio.ensure_future(engine.generate("a", [1, 2, 3], params))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="session 'a' has a running request"):
            await engine.generate("a", [1, 2, 3], params)
        await running
        with pytest.raises(EngineError, match="session 'a': token 1 of the history is 9, but the cache .* from 2"):
            await engine.generate("a", [1, 9, 3, 4, 5, 6], params)
        # An earlier state of the history is a prefix of it: the session goes back there.
        assert len((await engine.generate("a", [1, 2], params)).tokens) == 5
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate("a", [1, 2], params)

    asyncio.run(run())


def broken_step(*_: object) -> torch.Tensor:
    raise RuntimeError("out of memory")


def test_a_failed_step_fails_its_requests_and_not_the_engine(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TorchEngine(make_model("qwen3"), max_sessions=2, max_length=64)
    params = SamplingParams(max_new_tokens=5)

    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(CpuDecoder, "__call__", broken_step)
            results = await asyncio.gather(
                *[engine.generate(name, [1, 2, 3], params) for name in "ab"], return_exceptions=True
            )
        assert all(isinstance(result, EngineError) and "out of memory" in str(result) for result in results)
        assert len((await engine.generate("a", [1, 2, 3], params)).tokens) == 5

    asyncio.run(run())


def test_an_engine_whose_steps_all_fail_counts_as_broken_and_says_so_once(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = TorchEngine(make_model("qwen3"), max_sessions=2, max_length=64)
    params = SamplingParams(max_new_tokens=5)

    async def run() -> None:
        assert len((await engine.generate("a", [1, 2, 3], params)).tokens) == 5
        engine.release("a")
        monkeypatch.setattr(CpuDecoder, "__call__", broken_step)

        async def fails(name: str) -> None:
            with pytest.raises(EngineError, match="out of memory"):
                await engine.generate(name, [1, 2, 3], params)
            engine.release(name)

        await asyncio.gather(*(fails(f"session-{number}") for number in range(20)))
        assert engine.failure is not None and "3 decoding steps failed one after the other" in str(engine.failure)

    asyncio.run(run())
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("compact_decoder")
@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_completion_under_weights_that_are_not_finite_leaves_no_trace(
    make_model: MakeModel, plain_log_probs: Callable, is_aborted: bool
) -> None:
    """It is aborted amid its prompt, or fails."""
    model = make_model("qwen3")
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bad = {name: torch.full_like(tensor, float("nan")) for name, tensor in good.items()}
    reference = copy.deepcopy(model)
    engine = TorchEngine(model, max_sessions=2, max_length=128, prefill_budget=16)
    params = SamplingParams(max_new_tokens=5)
    prompt = random_tokens(80, 3)

    async def run() -> Generation:
        engine.load_state(bad, 1)
        amid = asyncio.ensure_future(engine.generate("a", prompt, params))
        if is_aborted:
            while engine.stats().prefill_tokens < 32:
                await asyncio.sleep(0)
            engine.release("a")
            assert not len((await amid).tokens)
        else:
            with pytest.raises(EngineError, match="weights of version 1 give logits that are not finite"):
                await amid
        engine.load_state(good, 2)
        return await engine.generate("b" if is_aborted else "a", prompt[:20], params)

    completion = asyncio.run(run())
    expected = plain_log_probs(reference, prompt[:20] + completion.tokens.tolist(), 20)
    np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)


@pytest.mark.parametrize("limit", ["max_sessions", "max_length", "prefill_budget"])
def test_limits_must_be_positive(make_model: MakeModel, limit: str) -> None:
    limits = {"max_sessions": 1, "max_length": 64, limit: 0}
    with pytest.raises(EngineError, match=f"{limit} is 0"):
        TorchEngine(make_model("qwen3"), **limits)


def test_max_length_beyond_the_models_positions_is_refused(make_model: MakeModel) -> None:
    with pytest.raises(EngineError, match="max_length is 513, but the model has 512 positions"):
        TorchEngine(make_model("qwen3"), max_sessions=1, max_length=513)
