"""Starting policy: a Hugging Face directory for every value that `model.path` may take."""

import os
import shutil
from pathlib import Path

from impala_llm.learning.policy.scratch import make_scratch_policy
from impala_llm.settings import Config, model_directory


def resolve_policy(config: Config) -> Path:
    """The directory of the starting policy; a `scratch` policy is made under `run.dir` if it is not there yet.

    The bytes of a scratch policy depend on `run.seed` and `model.scratch` alone: processes that make it at once agree.
    """
    directory = model_directory(config.model.path)
    if directory is not None:
        return directory
    shape = config.model.scratch
    # An earlier command may have left a policy of another seed or shape in this folder.
    name = f"scratch-{config.run.seed}-{shape.hidden_size}x{shape.num_layers}"
    target = Path(config.run.dir) / name
    if not (target / "config.json").is_file() or not (target / "model.safetensors").is_file():
        # Made under another name and renamed: no process sees an incomplete one.
        aside = target.with_name(f"{target.name}-{os.getpid()}")
        make_scratch_policy(aside, shape.hidden_size, shape.num_layers, config.run.seed)
        try:
            aside.rename(target)
        except OSError:  # another process was first, with the same bytes
            shutil.rmtree(aside)
    return target
