"""Model families: those computed right by the learner's packed rows and by the embedded engine, and those refused."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from impala_llm.checks.known_models import reasons_against
from impala_llm.engines.base import EngineError, ModelRefused, SamplingParams
from impala_llm.engines.embedded.engine import TorchEngine
from impala_llm.learning.policy.model import PolicyModel
from tests.families import REFUSED, RIGHT, VOCABULARY, build_family, family_config

pytestmark = pytest.mark.system

MAX_LENGTH = 200


def as_policy(name: str, directory: Path) -> PolicyModel:
    build_family(name).save_pretrained(directory)
    return PolicyModel.from_pretrained(directory)


def plain_log_probs(model: PreTrainedModel, row: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        table = model(row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return table.gather(1, row[1:, None]).squeeze(1)


@pytest.mark.parametrize("name", RIGHT)
def test_packed_rows_of_these_kinds_equal_plain_forwards(name: str, tmp_path: Path) -> None:
    policy = as_policy(name, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    lengths = [37, 100, 5]
    tokens = torch.randint(0, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        hidden = policy.hidden(tokens, positions, torch.tensor(lengths))
        for h, row in zip(hidden.split(lengths), tokens.split(lengths), strict=True):
            mine, _ = policy.action_log_probs(h[:-1], row[1:], 1.0)
            torch.testing.assert_close(mine, plain_log_probs(plain, row), atol=1e-4, rtol=0)
    assert policy.check(MAX_LENGTH) < 1e-5


@pytest.mark.parametrize("name", RIGHT)
def test_the_embedded_engine_says_of_these_kinds_what_a_plain_forward_says(name: str) -> None:
    plain = build_family(name)
    engine = TorchEngine(build_family(name), max_sessions=2, max_length=MAX_LENGTH)
    asyncio.run(engine.start())
    assert (engine.stats().prefill_tokens, engine.stats().decode_tokens) == (0, 0)
    prompt = torch.randint(0, VOCABULARY, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    completion = asyncio.run(engine.generate("a", prompt, SamplingParams(max_new_tokens=60)))
    expected = plain_log_probs(plain, torch.tensor(prompt + completion.tokens.tolist()))[39:]
    torch.testing.assert_close(torch.from_numpy(completion.log_probs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", REFUSED)
def test_these_kinds_are_refused_by_what_they_compute(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="docs/engines.md"):
        as_policy(name, tmp_path).check(MAX_LENGTH)
    with pytest.raises(ModelRefused, match="docs/engines.md"):
        asyncio.run(TorchEngine(build_family(name), max_sessions=2, max_length=MAX_LENGTH).start())


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "OPT"])
def test_more_tokens_than_a_model_has_positions_are_refused_by_its_configuration(name: str, tmp_path: Path) -> None:
    family_config(name).save_pretrained(tmp_path)
    assert reasons_against("model.path", "here", tmp_path, 256) == []
    (reason,) = reasons_against("model.path", "here", tmp_path, 257)
    assert "engine.max_length=257" in reason and "lower it to 256" in reason


@pytest.mark.parametrize("name", REFUSED)
def test_these_kinds_are_refused_by_their_configuration_alone(name: str, tmp_path: Path) -> None:
    family_config(name).save_pretrained(tmp_path)
    reasons = reasons_against("model.path", "here", tmp_path, MAX_LENGTH)
    assert reasons
    for reason in reasons:
        assert "model.path=here" in reason and ("docs/engines.md" in reason or "lower it to 64" in reason)


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_speaks_against_the_configuration_of_the_others(name: str, tmp_path: Path) -> None:
    family_config(name).save_pretrained(tmp_path)
    assert reasons_against("model.path", "here", tmp_path, MAX_LENGTH) == []


def test_a_refusal_names_the_model_the_figure_and_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=rf"{tmp_path} \(lfm2\).* packed rows differ by 0\.\d+ nats .* above 0.001"):
        as_policy("LFM2", tmp_path).check(MAX_LENGTH)


def test_longrope_is_right_up_to_its_original_length(tmp_path: Path) -> None:
    name = "Phi-3 with LongRoPE, beyond its original length"
    policy = as_policy(name, tmp_path)
    assert policy.check(64) < 1e-5
    asyncio.run(TorchEngine(build_family(name), max_sessions=1, max_length=64).start())
    with pytest.raises(ModelRefused, match=r"set engine.max_length=64"):
        policy.check(65)
    assert reasons_against("model.path", "here", tmp_path, 64) == []
    assert "lower it to 64" in reasons_against("model.path", "here", tmp_path, 65)[0]


def test_the_check_sees_a_window_however_long_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = as_policy("Mistral with a window", tmp_path)
    for layer in policy.lm.model.layers:
        monkeypatch.setattr(layer.self_attn.config, "sliding_window", 150)
    assert policy.check(MAX_LENGTH) < 1e-5
    attention = "impala_llm.learning.policy.model.nn.functional.scaled_dot_product_attention"
    original = torch.nn.functional.scaled_dot_product_attention

    def without_mask(*args: torch.Tensor, attn_mask: object, is_causal: bool, **kwargs: object) -> torch.Tensor:
        return original(*args, is_causal=True, **kwargs)

    monkeypatch.setattr(attention, without_mask)
    policy.check(150)
    with pytest.raises(ModelRefused, match="engine.max_length=150"):
        policy.check(MAX_LENGTH)


@pytest.mark.parametrize("max_length", [2, 3, 7, 33])
def test_short_limits_are_checked_as_far_as_they_go(max_length: int, tmp_path: Path) -> None:
    assert as_policy("Llama", tmp_path).check(max_length) < 1e-5
    asyncio.run(TorchEngine(build_family("Llama"), max_sessions=1, max_length=max_length).start())


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "Qwen2-MoE", "OLMoE"])
def test_weights_of_experts_travel_under_the_names_of_their_files(name: str, tmp_path: Path) -> None:
    new = build_family(name)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.1)
    new.save_pretrained(tmp_path)
    engine = TorchEngine(build_family(name), max_sessions=1, max_length=MAX_LENGTH)

    async def run() -> None:
        await engine.load_weights(tmp_path, version=1)
        completion = await engine.generate("a", [5, 6, 7], SamplingParams(max_new_tokens=20))
        expected = plain_log_probs(new, torch.tensor([5, 6, 7, *completion.tokens.tolist()]))[2:]
        torch.testing.assert_close(torch.from_numpy(completion.log_probs), expected, atol=1e-4, rtol=0)
        engine.load_state(dict(PolicyModel.from_pretrained(tmp_path).policy_weights()), version=2)
        with pytest.raises(EngineError, match="1 unknown: nothing"):
            engine.load_state({"nothing": torch.zeros(1)}, version=3)

    asyncio.run(run())


def test_bfloat16_is_not_held_to_the_figure_of_float32() -> None:
    engine = TorchEngine(build_family("Gemma").to(torch.bfloat16), max_sessions=2, max_length=MAX_LENGTH)
    asyncio.run(engine.start())
