#!/usr/bin/env python
"""Make the small policy that the quickstart starts from: tokenizer and causal LM, from the scripted shopper's episodes.

No model has to be downloaded. The policy clones a sloppy shopper for a few minutes, so it is competent but imperfect:
it knows the pages, the grammar and the products, seldom chooses options, and leaves reinforcement learning much to
find. A linear value head learns the final score of the same episodes beside it, on a detached trunk.

    python tools/make_tiny_policy.py --out impala_llm/assets/tiny_shopper --minutes 8 --threads 1 --seed 0

Demonstrations play the training goals of the quickstart's catalogue, never a goal of the validation or test split. The
tokenizer is made here; recording and training are `impala-llm demonstrate` and `impala-llm sft`.
What the committed policy scores, and what it cannot do, stands in impala_llm/assets/tiny_shopper/README.md.
"""

import argparse
import json
import os
import random
import shutil
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from impala_llm.cli import main as impala_llm
from impala_llm.config import load
from impala_llm.envs.webshop.suite import WebShopSuite, suite_from_config
from impala_llm.envs.webshop.synthetic import ASIN_WORDS
from impala_llm.learning.scratch import ACT, CHAT_TEMPLATE, END, PAD
from impala_llm.observability.writers import last_metrics

VOCABULARY_SIZE = 2800
TOKENIZER_EPISODES = 4000
WORD_OF_ASIN = "(?<=b0|b0[a-z]{4})[a-z]{4}(?![a-z]{1,3}\\b)"
"""One token for each word of an asin, the same in every catalogue, so that asins never seen are copied as well."""


def texts_of(suite: WebShopSuite, noise: float, seed: int) -> list[str]:
    """Pages and answers of episodes, for the tokenizer."""
    rng, tasks = random.Random(seed), suite.tasks("train")
    texts = []
    for number in range(TOKENIZER_EPISODES):
        session, script = suite.session(training=True), suite.script(noise, seed + number)
        observation, info = session.reset(rng.choice(tasks))
        is_over = False
        while not is_over:
            action = script.act(observation, info)
            texts += [observation, action]
            observation, _, terminated, truncated, info = session.step(action)
            is_over = terminated or truncated
    return texts


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
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
    # often enough that each word is merged to one token before rare text takes the places
    texts = texts + [" ".join(f"b0{word.lower()}" for word in ASIN_WORDS)] * 50
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="training time")
    parser.add_argument("--updates", type=int, help="end after so many updates")
    parser.add_argument("--episodes", type=int, default=16000, help="demonstrations to learn from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--action-weight", type=float, default=2.0, help="weight of answers in the loss; pages: 1")
    parser.add_argument("--noise", type=float, default=1.0, help="sloppiness of the shopper")
    parser.add_argument("--batch-size", type=int, default=5, help="demonstrations of an update")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("outputs/tiny_policy"), help="demonstrations and checkpoints")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    torch.manual_seed(args.seed)

    start = args.work / "start"
    if not (start / "model.safetensors").is_file():  # else an earlier call goes on
        suite = suite_from_config(load(["experiment=quickstart"]).env.webshop)
        tokenizer = train_tokenizer(texts_of(suite, args.noise, args.seed))
        tokenizer.save_pretrained(start)
        make_model(args, tokenizer).save_pretrained(start)
    status = impala_llm(["sft", *settings(args, start)])
    if status:
        sys.exit(status)
    shutil.copytree(args.work / "sft" / "policy", args.out, dirs_exist_ok=True)
    last = last_metrics(args.work / "sft" / "tensorboard")
    facts = {
        **{"seed": args.seed, "minutes": args.minutes, "noise": args.noise, "updates": int(last["step"])},
        **{"threads": args.threads, "learning_rate": args.learning_rate},
        **{"loss": round(last["sft/loss"], 4), "held_out_loss": round(last["sft/held_out_loss"], 4)},
    }
    (args.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def settings(args: argparse.Namespace, start: Path) -> list[str]:
    """Settings of the recording and the training, beside those of the quickstart."""
    return [
        "experiment=quickstart",
        "algorithm=ppo",  # one with a value head: the quickstart's own has none, and it would not be fitted
        f"model.path={start}",
        f"run.seed={args.seed}",
        f"demonstrations.dir={args.work / 'demonstrations'}",
        f"demonstrations.noise={args.noise}",
        f"demonstrations.num_episodes={args.episodes}",
        f"sft.dir={args.work / 'sft'}",
        f"sft.max_minutes={args.minutes}",
        f"sft.max_updates={args.updates or 'null'}",
        "sft.epochs=4",
        f"sft.batch_size={args.batch_size}",
        "sft.held_out_every=500",
        f"sft.learning_rate={args.learning_rate}",
        f"sft.value_learning_rate={args.learning_rate * args.hidden / 64}",  # a matrix has less of it the wider it is
        "sft.warmup_updates=50",
        f"sft.observation_weight={1 / args.action_weight}",
        "learner.weight_decay=0.01",
        "learner.adam_beta2=0.95",
        "learner.final_learning_rate_fraction=0.02",
        "model.value_hidden_size=0",
        "model.value_trunk_gradient=false",
    ]


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


if __name__ == "__main__":
    main()
