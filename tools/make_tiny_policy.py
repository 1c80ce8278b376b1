#!/usr/bin/env python
"""Make the small policy that the quickstart starts from: tokenizer and causal LM, from the scripted shopper's episodes.

No model has to be downloaded. The policy clones a sloppy shopper for a few minutes, so it is competent but imperfect:
it knows the pages, the grammar and the products, seldom chooses options, and leaves reinforcement learning much to
find. A linear value head learns the final score of the same episodes beside it, on a detached trunk.

    python tools/make_tiny_policy.py --out impala_llm/assets/tiny_shopper --minutes 8 --threads 1 --seed 0

Demonstrations play the training goals of the quickstart's catalogue, never a goal of the validation or test split.
What the committed policy scores, and what it cannot do, stands in impala_llm/assets/tiny_shopper/README.md.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from impala_llm.config import load
from impala_llm.envs.webshop.shopper import ScriptedShopper
from impala_llm.envs.webshop.suite import WebShopSuite, suite_from_config
from impala_llm.envs.webshop.synthetic import ASIN_WORDS
from impala_llm.learning.model import PolicyModel
from impala_llm.learning.products import prepare_cpu
from impala_llm.learning.scratch import ACT, CHAT_TEMPLATE, END, PAD
from impala_llm.rollout import ChatFormat

VOCABULARY_SIZE = 2800
WORD_OF_ASIN = "(?<=b0|b0[a-z]{4})[a-z]{4}(?![a-z]{1,3}\\b)"
"""One token for each word of an asin, the same in every catalogue, so that asins never seen are copied as well."""


def play(suite: WebShopSuite, task: int, shopper: ScriptedShopper) -> tuple[list[tuple[str, str]], float]:
    """One demonstration as (observation, action) pairs, and its score."""
    session = suite.session(training=True)
    observation, info = session.reset(task)
    shopper.reset()
    turns = []
    while True:
        action = shopper.act(observation, info)
        turns.append((observation, action))
        observation, _, terminated, truncated, info = session.step(action)
        if terminated or truncated:
            return turns, float(info["score"])


def demonstrations(suite: WebShopSuite, noise: float, seed: int) -> Iterator[tuple[list[tuple[str, str]], float]]:
    """Endless demonstrations over the training goals."""
    rng = random.Random(seed)
    shopper = ScriptedShopper(noise=noise, seed=seed)
    tasks = suite.tasks("train")
    while True:
        yield play(suite, rng.choice(tasks), shopper)


def train_tokenizer(episodes: list[list[tuple[str, str]]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in lower case, digits unsplit, so that prices and asins take few tokens."""
    backend = Tokenizer(models.BPE(byte_fallback=False))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_OF_ASIN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD, ACT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for episode in episodes for turn in episode for text in turn]
    # often enough that each word is merged to one token before rare text takes the places
    texts += [" ".join(f"b0{word.lower()}" for word in ASIN_WORDS)] * 50
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[ACT],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def to_tokens(
    chat: ChatFormat, tokenizer: PreTrainedTokenizerFast, turns: list[tuple[str, str]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """The token row of a demonstration, as a rollout would lay it out, and the [start, end) of each answer."""
    row: list[int] = []
    spans = []
    end = tokenizer.eos_token_id
    for observation, action in turns:
        row += chat.following(observation, end) if row else chat.first(observation)
        start = len(row)
        row += [*tokenizer.encode(action, add_special_tokens=False), end]
        spans.append((start, len(row)))
    return row, spans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="training time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--action-weight", type=float, default=2.0, help="weight of answers in the loss; pages: 1")
    parser.add_argument("--noise", type=float, default=1.0, help="sloppiness of the shopper")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of an update")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    prepare_cpu(args.threads)
    torch.manual_seed(args.seed)
    random.seed(args.seed)

    config = load(["experiment=quickstart", "model=scratch"])
    suite = suite_from_config(config.env.webshop)
    stream = demonstrations(suite, args.noise, args.seed)
    first = [next(stream) for _ in range(4000)]
    print(f"shopper: score {np.mean([score for _, score in first]):.3f}, "
          f"success {np.mean([score == 1.0 for _, score in first]):.3f}")  # fmt: skip

    tokenizer = train_tokenizer([turns for turns, _ in first])
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.out)
    chat = ChatFormat(tokenizer)
    lm = make_model(args, tokenizer)
    lm.save_pretrained(args.out)
    model = PolicyModel.from_pretrained(args.out)
    print(f"parameters: {sum(p.numel() for p in lm.parameters()) / 1e6:.2f} M")

    step, seen, running = train(model, args, stream, chat, tokenizer)
    model.save(args.out)
    (args.out / "training.json").write_text(
        json.dumps({"seed": args.seed, "minutes": args.minutes, "noise": args.noise, "updates": step, "tokens": seen,
                    "threads": args.threads, "learning_rate": args.learning_rate, "loss": round(running, 4)}, indent=1)
        + "\n"
    )  # fmt: skip


def make_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Qwen3 with random weights."""
    return AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 32,
            num_key_value_heads=max(1, args.hidden // 64),
            head_dim=32,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def train(
    model: PolicyModel,
    args: argparse.Namespace,
    stream: Iterator[tuple[list[tuple[str, str]], float]],
    chat: ChatFormat,
    tokenizer: PreTrainedTokenizerFast,
) -> tuple[int, int, float]:
    """Train for `args.minutes`. Returns updates, tokens and the moving average of the loss of answers."""
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    started, step, seen, lengths, running = time.monotonic(), 0, 0, [], 0.0
    while (elapsed := (time.monotonic() - started) / (60 * args.minutes)) < 1.0:
        scale = min(1.0, (step + 1) / 50) * max(0.02, 1.0 - elapsed)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * scale
        rows, spans, scores, offset = [], [], [], 0
        while offset < args.tokens:
            turns, score = next(stream)
            row, answers = to_tokens(chat, tokenizer, turns)
            rows.append(row)
            spans += [(offset + start, offset + end) for start, end in answers]
            scores += [score] * len(answers)
            offset += len(row)
        loss, value_loss, answers = update(model, rows, spans, scores, args.action_weight)
        (loss + value_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + offset
        lengths += [len(row) for row in rows]
        running = answers if step == 1 else 0.98 * running + 0.02 * answers
        if step % 200 == 0:
            rate = seen / (time.monotonic() - started)
            print(
                f"step {step}  loss of answers {running:.4f}  of all {loss.item():.3f}  value {value_loss.item():.4f}"
                f"  tokens/s {rate:.0f}  tokens an episode {np.mean(lengths):.0f}  {elapsed:.0%}",
                flush=True,
            )
    return step, seen, running


def update(
    model: PolicyModel, rows: list[list[int]], spans: list[tuple[int, int]], scores: list[float], action_weight: float
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Losses of one batch: weighted cross-entropy of all next tokens, the value's, and that of answers as a number.

    Observations teach the language of the shop. Answers are a fifth of the tokens and weigh `action_weight` times as
    much.
    """
    tokens = torch.tensor([t for row in rows for t in row])
    lengths = torch.tensor([len(row) for row in rows])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    hidden = model.hidden(tokens, positions, lengths)
    is_action = torch.zeros(len(tokens), dtype=torch.bool)
    for start, end in spans:
        is_action[start:end] = True
    ends = lengths.cumsum(0) - 1
    predicts = torch.ones(len(tokens), dtype=torch.bool)
    predicts[ends] = False  # the last token of a row predicts nothing
    logits = model.logits(hidden[predicts])
    per_token = torch.nn.functional.cross_entropy(logits, tokens[1:][predicts[:-1]], reduction="none")
    weights = torch.where(is_action[1:], action_weight, 1.0)[predicts[:-1]]
    loss = (weights * per_token).sum() / weights.sum()
    answers = per_token[is_action[1:][predicts[:-1]]].mean()
    value = model.values(hidden[torch.tensor([start - 1 for start, _ in spans])])
    return loss, 0.5 * (value - torch.tensor(scores)).square().mean(), answers.item()


if __name__ == "__main__":
    main()
