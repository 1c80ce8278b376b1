"""Files of the models that a run reads: which of them cannot be used. Each problem is a sentence with key, value and
fix. Nothing here imports torch."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from impala_llm.checks.known_models import vocab_size
from impala_llm.learning.policy.model_files import json_object, tensor_shapes, weight_files
from impala_llm.settings import Config, model_directory, other_models

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Any of them is enough."""
ADAPTER_FILE = "adapter_config.json"


def starting_policy_problems(config: Config) -> list[str]:
    """Starting policies that never score in an environment: nothing would be learned from."""
    env, path = config.env.name, config.model.path
    if config.agent.is_set:  # whose tasks no policy names
        return []
    if path == "tiny_shopper" and env != "webshop":
        return [f"model.path=tiny_shopper has learned to shop and nothing else: with env={env} set model=scratch"]
    if path == "tiny_shopper" and config.env.webshop.observation_mode != "compact":
        mode = config.env.webshop.observation_mode
        return [
            f"env.webshop.observation_mode={mode}: model.path=tiny_shopper reads pages of mode compact alone; leave "
            "it out, or set model=pretrained model.path=DIRECTORY"
        ]
    if path == "tiny_shopper" and not config.env.webshop.row_numbers:
        return [
            "env.webshop.row_numbers=false: model.path=tiny_shopper clicks results by their numbers: set "
            "env.webshop.row_numbers=true, as model=tiny_shopper does"
        ]
    if path == "scratch" and env == "webshop":
        return [
            "model.path=scratch begins with random weights and a tokenizer of characters, and never scores with "
            "env=webshop: set model=tiny_shopper, or model=pretrained model.path=DIRECTORY"
        ]
    return []


def model_problems(config: Config) -> list[str]:
    """The files of model.path: whole, with tokenizer and chat template. Its config.json: checks/known_models.py."""
    directory = model_directory(config.model.path)
    if directory is None:
        return []  # made from scratch
    where = f"model.path={config.model.path}"
    try:
        tokenizer = directory / "tokenizer_config.json"
        template = json_object(tokenizer).get("chat_template") if tokenizer.is_file() else None
        if (vocabulary := directory / "tokenizer.json").is_file():
            json_object(vocabulary)
    except ValueError as error:
        return [f"{where}: {error}: copy the model again"]
    found = _weights("model.path", config.model.path, directory)
    if not template and not any((directory / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        found.append(
            f"{where} has no chat template, by which observations become tokens: take an instruction-tuned model, or "
            "put a chat_template.jinja into the folder"
        )
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        found.append(
            f"{where} has no tokenizer ({', '.join(TOKENIZER_FILES)}): copy the model again, with all its files"
        )
    return found


def adapter_problems(config: Config) -> list[str]:
    """Targets of adapters that the model does not have; one that is made from scratch is not looked at."""
    lora, directory = config.model.lora, model_directory(config.model.path)
    if not lora.rank or lora.targets == ["all-linear"] or directory is None:
        return []
    shapes = tensor_shapes(config.model.path)
    matrices = {name.removesuffix(".weight"): shape for name, shape in shapes if len(shape) == 2}
    unknown = [t for t in lora.targets if matrices and not any(f".{name}".endswith(f".{t}") for name in matrices)]
    num_tokens = vocab_size(directory)  # rows of embeddings, which are refused
    there = ", ".join(sorted({name.rpartition(".")[2] for name, (n, _) in matrices.items() if n != num_tokens}))
    return [
        f"model.lora.targets={list(lora.targets)}: no matrix of model.path={config.model.path} is named {name}: choose "
        f"from {there}, or all-linear"
        for name in unknown
    ]


def other_model_problems(config: Config) -> list[str]:
    """The files of the other models that the learner loads."""
    found = []
    for key, path in other_models(config).items():
        if (directory := model_directory(path)) is not None:
            found += _weights(key, path, directory)
    return found


def _weights(key: str, path: str, directory: Path) -> list[str]:
    """Problems with the configuration and the weights of a model."""
    where = f"{key}={path}"
    try:
        config = json_object(directory / "config.json")
        if not isinstance(config.get("model_type"), str):
            raise ValueError("config.json has no model_type")
        files = weight_files(directory)
    except ValueError as error:
        return [f"{where}: {error}: copy the model again"]
    if (directory / ADAPTER_FILE).exists():  # transformers would put the adapter in, and engines know no such weights
        return [
            f"{where} has an adapter beside its weights ({ADAPTER_FILE}): merge the adapter first (merge_and_unload of "
            "peft, then save_pretrained into another folder), or take its files out of the folder"
        ]
    found, names = [], set()
    for file in files:
        try:
            with safe_open(file, "np") as tensors:
                names.update(tensors.keys())
        except (OSError, SafetensorError) as error:
            found.append(f"{where}: {file.name} is missing or damaged ({error}): copy the model again")
    if not found and (missing := _missing_layers(config, names)):
        found.append(
            f"{where}: the weights lack {len(missing)} of the layers that config.json counts, the first is layer "
            f"{missing[0]}: copy the model again"
        )
    return found


def _missing_layers(config: dict[str, Any], names: Iterable[str]) -> list[int]:
    """Layers that a model has by its config.json, and none of its tensors belongs to. Other tensors that are missing
    are found when the model is loaded."""
    text = config.get("text_config")
    number = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    there = {int(match[1]) for name in names if (match := re.search(r"\.(\d+)\.", name))}
    return sorted(set(range(number)) - there) if isinstance(number, int) else []
