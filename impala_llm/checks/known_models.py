"""Reasons against a model by its config.json alone: a look without torch, before any process starts.

It knows what was tried. All other models are compared with transformers when learner and actors start, which is what
decides (engines/embedded/model_check.py); docs/engines.md lists what was run.
"""

import json
from pathlib import Path
from typing import Any

_STATE = "passes a state on from token to token, and so from one packed row to the next"
_OWN_ATTENTION = "does not compute its attention through transformers' attention interface"
REFUSED_KINDS = {
    "bloom": _OWN_ATTENTION,
    "deepseek_v3": "has keys and values of different widths, which neither packed rows nor the engine's cache hold",
    "falcon": _OWN_ATTENTION,
    "falcon_h1": _STATE,
    "gpt_oss": "has sinks in its attention, which ours lacks",
    "lfm2": _STATE,
    "mamba": _STATE,
    "minimax": _STATE,
    "mpt": _OWN_ATTENTION,
    "nemotron": _OWN_ATTENTION,
    "qwen3_next": _STATE,
    "stablelm": "does not tell its attention which rows are packed",
}
"""By `model_type`: a random model of the kind was computed wrongly, or not at all."""
_PLAIN_LAYERS = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
_TABLE = "take a model of the table in docs/engines.md"
HEADS = ("num_attention_heads", "num_key_value_heads")
"""Numbers of a config.json that learner.tensor_parallel must divide."""
NOT_DIVIDED = "set another number, or learner.tensor_parallel=1 with learner.sharding=fsdp2"
"""Fix for a model that learner.tensor_parallel does not divide."""


def reasons_against(key: str, path: str, directory: Path, max_length: int) -> list[str]:
    """Sentences with key, value and fix; empty where there are none, or the config is unreadable.

    Args:
        key, path: the setting and its value, for the sentences.
        directory: that of the model.
        max_length: `engine.max_length`.
    """
    whole = _config_of(directory)
    try:
        return _reasons(key, path, whole, max_length)
    except (AttributeError, TypeError, ValueError) as error:
        return [f"{key}={path}: config.json has a value of a wrong type ({error}): copy the model again"]


def undivided_heads(directory: Path, size: int) -> list[str]:
    """Sentences about a policy whose heads the processes of a rank cannot share equally; empty where they can, or its
    config.json does not say.

    Args:
        size: `learner.tensor_parallel`.
    """
    whole = _config_of(directory)
    text = whole.get("text_config")
    heads = text if isinstance(text, dict) else whole
    model = f"the model {directory} ({whole.get('model_type')})"
    return [
        f"learner.tensor_parallel={size} cannot be used: {model} {undivided(name, number)}; {NOT_DIVIDED}"
        for name in HEADS
        if isinstance(number := heads.get(name), int) and number % size
    ]


def undivided(name: str, number: int) -> str:
    """Reason against a model with so many heads."""
    return f"has {name}={number}, which it does not divide"


def vocab_size(directory: Path) -> int | None:
    """Size of a model's vocabulary, with what it is padded by; None where its config.json does not say."""
    whole = _config_of(directory)
    text = whole.get("text_config")
    size = (text if isinstance(text, dict) else whole).get("vocab_size")
    return size if isinstance(size, int) else None


def num_positions(whole: dict[str, Any]) -> int | None:
    """Number of a model's positions by its config.json, parsed; None where that does not say.

    Raises AttributeError or TypeError for values of wrong types.
    """
    text = whole.get("text_config") or whole
    positions = text.get("max_position_embeddings", text.get("n_positions"))  # n_positions: GPT-2
    if not isinstance(positions, int | None):
        raise TypeError(f"max_position_embeddings is {positions!r}")
    return positions


def other_vocabulary(key: str, path: str | Path, size: int, of_policy: int) -> str:
    """Message for a model that cannot score the tokens of a policy, since its vocabulary has another size."""
    return (
        f"{key}={path} has a vocabulary of {size} tokens, the policy one of {of_policy}: name a model with the "
        f"policy's tokenizer, or leave it out ({key}=null)"
    )


def _config_of(directory: Path) -> dict[str, Any]:
    """A model's config.json; empty where it cannot be read: transformers says why when it loads the model."""
    try:
        whole = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return whole if isinstance(whole, dict) else {}


def _reasons(key: str, path: str, whole: dict[str, Any], max_length: int) -> list[str]:
    text = whole.get("text_config") or whole
    kind = whole.get("model_type", "")
    if (reason := REFUSED_KINDS.get(kind)) is not None:
        return [f"{key}={path} is a model of kind {kind}, which {reason}: {_TABLE}"]
    found = []
    if others := sorted(set(text.get("layer_types") or ()) - _PLAIN_LAYERS):
        found.append(
            f"{key}={path} has layers of type {', '.join(others)}, whose state packed rows would share: {_TABLE}"
        )
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if text.get(name) is not None:
            found.append(f"{key}={path} has {name}={text[name]:g}, a cap that is not computed here: {_TABLE}")
    positions = num_positions(whole)
    original = _original_positions(text)
    if isinstance(positions, int) and max_length > positions:
        found.append(
            f"engine.max_length={max_length} is more than the {positions} positions of {key}={path}: lower it to "
            f"{min(positions, original or positions)}"
        )
    elif original is not None and max_length > original:
        found.append(
            f"engine.max_length={max_length} is beyond the {original} tokens from where on the frequencies of {key}="
            f"{path} depend on the longest row of a batch: lower it to {original}"
        )
    return found


def _original_positions(text: dict[str, Any]) -> int | None:
    """Length beyond which LongRoPE changes all frequencies; None without LongRoPE."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if "longrope" not in (rope.get("rope_type"), rope.get("type")):
        return None
    original = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    return original if isinstance(original, int) else None
