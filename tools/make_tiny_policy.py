#!/usr/bin/env python
"""Make the small policy that the quickstart starts from: tokenizer and causal LM, from the scripted shopper's episodes.

No model has to be downloaded. The policy clones a sloppy shopper, so it is competent but imperfect: it knows the pages,
the grammar and how to judge a product by its features, but buys without the options or above the price, and leaves
reinforcement learning much to find. A linear value head learns the final score of the same episodes beside it,
on a detached trunk.

    python tools/make_tiny_policy.py --out impala_llm/assets/tiny_shopper --updates 2000 --minutes 60 --threads 1

Demonstrations play training goals of hard catalogues of the seeds from 1000 on, none of which the quickstart plays. The
tokenizer is made here; recording and training are `impala-llm demonstrate` and `impala-llm sft`.
What the committed policy scores, and what it cannot do, stands in impala_llm/assets/tiny_shopper/README.md.
"""

import argparse
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from impala_llm.cli import main as impala_llm
from impala_llm.config import load
from impala_llm.envs.webshop.shelves import ATTRIBUTES, OPTION_VALUES, SHELVES, SYNONYMS, TAILS
from impala_llm.envs.webshop.suite import WebShopSuite, suite_from_config
from impala_llm.learning.policy.scratch import ACT, CHAT_TEMPLATE, END, PAD
from impala_llm.observability.writers import METRICS_FILE

TOKENIZER_EPISODES = 60
"""Episodes of each catalogue from which the words are taken."""
FIRST_CATALOGUE = 1000
"""Catalogues from this seed on are learned from; those of smaller seeds are left to training and evaluation."""
HIGHEST_PRICE = 400
HEAD_SIZE = 32
CAPITAL = 0.5
"""Length of what the first embedding of a word with a capital has beside that of the word without, which has 1."""
SHARPNESS = 1.5
"""First scale of queries and keys: 1.5² √32 = 13 between words that are the same, near 0 between others."""
PHRASES = {
    *(phrase for of_group in (OPTION_VALUES, ATTRIBUTES) for phrases in of_group.values() for phrase in phrases),
    *(name for pair in SYNONYMS.items() for name in pair),
    *(shelf.query for shelf in SHELVES),
    *TAILS,
}
"""Phrases of several words that the shop uses, such as "sugar free", "2 pack" or "face cream"."""
PIECE = (
    rf"(?<![\w'.-])(?i:{'|'.join(map(re.escape, sorted(PHRASES, key=len, reverse=True)))})(?![\w'.-])"
    r"|(?:click|search)\[|\$?\d+(?:\.\d+)?|[\w'&-]+|\S|\n"
)
"""A token each: a phrase, the beginning of an action, a price or number, a word, a mark, the end of a line."""


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


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A token for each word and phrase of the texts, whatever stands before it; bytes for others."""
    words = {word for text in texts for word in re.findall(PIECE, text)}
    words.update(f"${price}.0" for price in range(1, HIGHEST_PRICE))
    before = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    pieces = [before.pre_tokenize_str(word)[0][0] for word in sorted(words)]
    tokens = [PAD, ACT, END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [piece for piece in pieces if len(piece) > 1]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), behavior="isolated"),
            pre_tokenizers.Split(Regex(r"\A[^\S\n]+\z"), behavior="removed"),
            before,
        ]
    )
    backend.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Replace("[ ", "["), decoders.Replace(" ]", "]"), decoders.Strip(" ", 1, 0)]
    )
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
    parser.add_argument("--minutes", type=float, default=15.0, help="training time")
    parser.add_argument("--updates", type=int, help="end after so many updates")
    parser.add_argument("--episodes", type=int, default=20000, help="demonstrations to learn from")
    parser.add_argument("--catalogues", type=int, default=100, help="catalogues to learn from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=1.0, help="sloppiness of the shopper")
    parser.add_argument("--batch-size", type=int, default=16, help="demonstrations of an update")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("outputs/tiny_policy"), help="demonstrations and checkpoints")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    torch.manual_seed(args.seed)

    start = args.work / "start"
    if not (start / "model.safetensors").is_file():  # else an earlier call goes on
        shop = load(["experiment=quickstart", "env.webshop.script_speaks=true"]).env.webshop
        suites = (suite_from_config(replace(shop, catalogue_seed=seed)) for seed in catalogues(args))
        tokenizer = make_tokenizer([text for suite in suites for text in texts_of(suite, args.noise, args.seed)])
        tokenizer.save_pretrained(start)
        make_model(args, tokenizer).save_pretrained(start)
    status = impala_llm(["sft", *settings(args, start)])
    if status:
        sys.exit(status)
    shutil.copytree(args.work / "sft" / "policy", args.out, dirs_exist_ok=True)
    lines = (args.work / "sft" / "tensorboard" / METRICS_FILE).read_text().splitlines()
    updates, loss, held_out_loss = last_values(lines, "step", "sft/loss", "sft/held_out_loss")
    facts = {
        **{"seed": args.seed, "minutes": args.minutes, "noise": args.noise, "updates": updates},
        **{"threads": args.threads, "learning_rate": args.learning_rate, "loss": loss, "held_out_loss": held_out_loss},
    }
    (args.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def last_values(lines: Sequence[str], *names: str) -> list[float | None]:
    """The last value of each metric, to four digits; None where no line has it. A line has what was measured since the
    one before."""
    found = {name: value for line in lines for name, value in json.loads(line).items() if value is not None}
    return [round(found[name], 4) if name in found else None for name in names]


def catalogues(args: argparse.Namespace) -> range:
    """Seeds of the catalogues to learn from."""
    return range(FIRST_CATALOGUE, FIRST_CATALOGUE + args.catalogues)


def settings(args: argparse.Namespace, start: Path) -> list[str]:
    """Settings of the recording and the training, beside those of the quickstart."""
    return [
        "experiment=quickstart",
        "algorithm=ppo",  # one with a value head: the quickstart's own has none, and it would not be fitted
        f"model.path={start}",
        f"env.webshop.catalogue_seed={FIRST_CATALOGUE}",
        "env.webshop.script_speaks=true",
        f"demonstrations.num_catalogues={args.catalogues}",
        f"run.seed={args.seed}",
        f"demonstrations.dir={args.work / 'demonstrations'}",
        f"demonstrations.noise={args.noise}",
        f"demonstrations.num_episodes={args.episodes}",
        f"sft.dir={args.work / 'sft'}",
        f"sft.max_minutes={args.minutes}",
        f"sft.max_updates={args.updates or 'null'}",
        "sft.epochs=8",
        f"sft.batch_size={args.batch_size}",
        "sft.held_out_every=500",
        f"sft.learning_rate={args.learning_rate}",
        f"sft.value_learning_rate={args.learning_rate * args.hidden / 64}",  # a matrix has less of it the wider it is
        "sft.warmup_updates=50",
        "learner.weight_decay=0.01",
        "learner.adam_beta2=0.95",
        "learner.final_learning_rate_fraction=0.02",
        "model.value_hidden_size=0",
        "model.value_trunk_gradient=false",
    ]


def make_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Qwen3 with random weights, half of whose heads begin by looking for the same word further back.

    Queries equal to keys, in the dimensions that rotate slowly, are near the mimetic initialisation of Trockman and
    Kolter, "Mimetic Initialization of Self-Attention Layers", 2023. A word with a capital, as on a features page,
    begins near the word without, as in an instruction: to answer whether a page has an attribute is to find it there.
    From such weights that takes a few hundred updates; from the usual ones it was not learned in two thousand.
    """
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // HEAD_SIZE,
            num_key_value_heads=max(1, args.hidden // (2 * HEAD_SIZE)),
            head_dim=HEAD_SIZE,
            max_position_embeddings=4096,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            initializer_range=0.06,  # the usual 0.02 is for a width of a thousand and more
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    vocabulary, words = tokenizer.get_vocab(), model.get_input_embeddings().weight
    capital = CAPITAL * words.std() * torch.randn(args.hidden)
    with torch.no_grad():
        for token, number in vocabulary.items():
            small = vocabulary.get(token.replace("Ġ", " ").lower().replace(" ", "Ġ"), number)
            if small != number and token.startswith("Ġ"):  # what stands for a space
                words[number] = words[small] + 0.3 * words[number] + capital
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.q_norm.weight.fill_(SHARPNESS)
            attention.k_norm.weight.fill_(SHARPNESS)
            per_key = attention.num_key_value_groups
            queries = attention.q_proj.weight.view(-1, per_key, HEAD_SIZE, args.hidden)
            keys = attention.k_proj.weight.view(-1, HEAD_SIZE, args.hidden)
            for half in keys[::2].view(-1, 2, HEAD_SIZE // 2, args.hidden).unbind(1):
                half[:, : HEAD_SIZE // 4] = 0.0  # the faster half of the frequencies
            queries[::2] = keys[::2].unsqueeze(1)
    return model


if __name__ == "__main__":
    main()
