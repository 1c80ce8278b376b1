"""Loading of a model from a Hugging Face directory: whole, or not at all."""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from impala_llm.engines.base import ModelRefused
from impala_llm.engines.embedded.model_check import refusing

_NAMED = 3
"""Missing tensors that a message names."""


def load_whole(directory: Path | str, key: str, kind: Any = AutoModelForCausalLM, **options: Any) -> PreTrainedModel:
    """Load a model that has all of its weights in its files: transformers would draw the others at random.

    Args:
        key: the setting that names the directory, for the message.
        kind: class of transformers that knows how to load it.
        options: of `from_pretrained`.

    Raises:
        ModelRefused: the files are missing or damaged, or lack weights.
    """
    refused = refusing(f"{key}={directory} cannot be loaded", f"copy the model again, or set {key} to another")
    if key == "model.path":  # the directory may be a scratch policy's or a checkpoint's, which it does not name
        refused = refusing(f"the model {directory} cannot be loaded")
    with refused:
        lm, found = kind.from_pretrained(directory, local_files_only=True, output_loading_info=True, **options)
    # What a model fills by itself, such as a tied head or a table of positions, transformers does not count as missing.
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise ModelRefused(
            f"{key}={directory} lacks weights of a {type(lm).__name__}, and random ones would take their place: "
            f"{', '.join(missing[:_NAMED])}{more}; copy the model again, or set {key} to one that has them"
        )
    loaded: PreTrainedModel = lm
    return loaded
