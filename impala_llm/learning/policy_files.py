"""Starting policy: a Hugging Face directory for every value that `model.path` may take."""

import os
import shutil
from pathlib import Path

from impala_llm.learning.scratch import make_scratch_policy
from impala_llm.settings import Config, model_directory


def resolve_policy(config: Config) -> Path:
    """The directory of the starting policy; a `scratch` policy is made under `run.dir` if it is not there yet.

    The bytes of a scratch policy depend on `run.seed` only, so processes that make it at once agree.
    """
    directory = model_directory(config.model.path)
    if directory is not None:
        return directory
    target = Path(config.run.dir) / f"scratch-{config.run.seed}"
    if not (target / "config.json").is_file() or not (target / "model.safetensors").is_file():
        shape = config.model.scratch
        # Made aside and renamed: nobody sees half of one.
        aside = target.with_name(f"{target.name}-{os.getpid()}")
        make_scratch_policy(aside, shape.hidden_size, shape.num_layers, config.run.seed)
        try:
            aside.rename(target)
        except OSError:  # another process was first, with the same bytes
            shutil.rmtree(aside)
    return target
