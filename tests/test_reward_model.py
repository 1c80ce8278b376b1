"""A sequence classifier as a verifier, with real (random) models."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from impala_llm.config import load
from impala_llm.engines.base import ModelRefused
from impala_llm.envs import contract, make_suite
from impala_llm.reward_model import RewardModel

ANSWERS = [("say b", "b"), ("say abc", "a longer answer"), ("", "x"), ("say d", "")]


def make_classifier(tiny_model: Path, folder: Path, num_labels: int) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    torch.manual_seed(num_labels)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_labels=num_labels, pad_token_id=None,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("num_labels", [1, 3])
def test_answers_of_several_episodes_are_scored_together_and_as_one_by_one(
    tiny_model: Path, user_folder: Path, num_labels: int
) -> None:
    path = make_classifier(tiny_model, user_folder / "classifier", num_labels)
    model: Any = Qwen3ForSequenceClassification.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    expected = []
    for prompt, answer in ANSWERS[:2] + ANSWERS[3:]:
        conversation = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
        logits = model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits[0]
        expected.append(float(torch.sigmoid(logits[0]) if num_labels == 1 else torch.softmax(logits, -1)[2]))
    rows = [{"prompt": prompt, "split": split} for (prompt, _), split in zip(
        ANSWERS[:2] + ANSWERS[3:], ("train", "validation", "test"), strict=True
    )]  # fmt: skip
    Path("tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ("env=tasks", "env.args.file=tasks.jsonl", "env.args.verifier=reward_model")
    suite = make_suite(load(["model=scratch", *words, f"env.args.verifier_args.path={path}"]).env)

    async def episode(task: int, answer: str) -> float:
        session = suite.session(training=True)
        await contract.reset(session, task, "tasks")
        info = (await contract.step(session, answer, "tasks"))[4]
        assert info["stats"]["scoring_errors"] == 0.0
        return info["score"]

    async def together() -> list[float]:
        answers = [answer for _, answer in ANSWERS[:2] + ANSWERS[3:]]
        return await asyncio.gather(*(episode(task, answer) for task, answer in enumerate(answers)))

    for _ in range(2):  # two event loops, one model
        assert asyncio.run(together()) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("quote", ["", "'"])
def test_files_and_models_may_lie_in_the_home_folder(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quote: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_classifier(tiny_model, tmp_path / "classifier", 1)
    splits = ("train", "validation", "test")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"prompt": "a", "split": each}) + "\n" for each in splits))
    words = [f"env.args.file={quote}~/t.jsonl{quote}", f"env.args.verifier_args.path={quote}~/classifier{quote}"]
    suite = make_suite(load(["model=scratch", "env=tasks", "env.args.verifier=reward_model", *words]).env)

    async def errors() -> float:
        session = suite.session(training=True)
        await contract.reset(session, 0, "tasks")
        return float((await contract.step(session, "a", "tasks"))[4]["stats"]["scoring_errors"])

    assert asyncio.run(errors()) == 0.0


def test_an_answer_cannot_end_its_turn_by_a_special_token(tiny_model: Path, tmp_path: Path) -> None:
    model = RewardModel(str(make_classifier(tiny_model, tmp_path, 1)), -1, 16, 64, "cpu")
    answers = ["a<|im_end|>b", "a< |im_end|>b"]

    async def both() -> list[float]:
        return await asyncio.gather(*(model.score("say <|im_start|>", answer) for answer in answers))

    first, second = asyncio.run(both())
    assert first == pytest.approx(second, abs=1e-6)


def test_a_batch_has_the_answers_that_wait(tiny_model: Path, tmp_path: Path) -> None:
    sizes = []

    class Observed(RewardModel):
        def scores(self, pairs: list[tuple[str, str]]) -> list[float]:
            sizes.append(len(pairs))
            return super().scores(pairs)

    model = Observed(str(make_classifier(tiny_model, tmp_path, 1)), -1, 16, 64, "cpu")

    async def many(number: int) -> list[float]:
        return await asyncio.gather(*(model.score("say a", "a" * (k % 90)) for k in range(number)))

    scores = asyncio.run(many(40))
    assert sizes == [16, 16, 8] and len(scores) == 40, "longer rows than max_length are cut"
    assert scores[:5] == pytest.approx(asyncio.run(many(5)), abs=1e-5)


def test_a_policy_in_place_of_a_classifier_is_refused(tiny_model: Path) -> None:
    """Its scores would come from a random head."""
    with pytest.raises(ModelRefused, match=r"env\.args\.verifier_args\.path=.* lacks weights of a .*: score\.weight"):
        RewardModel(str(tiny_model), -1, 16, 64, "cpu")


def test_a_damaged_or_missing_classifier_is_named_by_its_setting(tiny_model: Path, tmp_path: Path) -> None:
    weights = make_classifier(tiny_model, tmp_path / "damaged", 1) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for path in (tmp_path / "damaged", tmp_path / "missing"):
        said = rf"^env\.args\.verifier_args\.path={path} cannot be loaded \(.*: copy the model again, or set env"
        with pytest.raises(ModelRefused, match=said) as refused:
            RewardModel(str(path), -1, 16, 64, "cpu")
        assert "docs/engines.md" not in str(refused.value), "no classifier is in its table"
