"""Weight updates of one server while it answers requests: the three policies, and the checks before an update.

Invariant: a server is sent only directories whose tensors are exactly those of its model. With other shapes a server
tries to restore the old weights by reading the same directory once more, and dies; and it does not notice missing
tensors, which would leave it with a mixture of two versions.
"""

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from impala_llm.engines.base import EngineError, ModelRefused
from impala_llm.engines.sglang.client import ServerLost, ServerRefused, SGLangClient

InFlight = Literal["keep_kv", "recompute_kv", "drain"]
IN_FLIGHT: tuple[InFlight, ...] = ("keep_kv", "recompute_kv", "drain")
_OUTPUT_HEAD = "lm_head.weight"

Layout = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape."""


@dataclass(frozen=True)
class UpdateTimes:
    """Durations of one change of weights, in seconds. Of several servers, those of the slowest."""

    pause_s: float
    """Time in which completions stood still, or, under "drain", new ones were held back."""
    transfer_s: float
    """Part of it in which the server read the weights."""


def read_layout(directory: Path) -> Layout:
    """Read names and shapes from a Hugging Face directory; the output head of tied embeddings is left out.

    Where a file has one of the names that Hugging Face gives to a model's weights, only such files count: the learner
    keeps its value head beside them.

    Raises:
        EngineError: there are no weights, or they are unreadable or cut off.
    """
    directory = Path(directory)
    files = sorted(directory.glob("model*.safetensors")) or sorted(directory.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{directory}: no *.safetensors there; a local Hugging Face model directory is expected")
    layout: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118
                    layout[name] = tuple(file.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise EngineError(f"cannot read the weights {path}: {error}") from error
    if _is_tied(directory):
        layout.pop(_OUTPUT_HEAD, None)
    return layout


def check_layout(found: Layout, expected: Layout, directory: Path) -> None:
    """Compare two layouts. Raises ModelRefused where tensors are missing, unknown or of another shape."""
    if _OUTPUT_HEAD not in expected:  # the embeddings are tied
        found = {name: shape for name, shape in found.items() if name != _OUTPUT_HEAD}
    wrong = [
        f"{name} is {list(shape)} and should be {list(expected[name])}"
        for name, shape in found.items()
        if name in expected and shape != expected[name]
    ]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        for what, names in (
            ("missing", sorted(expected.keys() - found.keys())),
            ("unknown", sorted(found.keys() - expected.keys())),
            ("of another shape", wrong),
        )
        if names
    ]
    if problems:
        raise ModelRefused(
            f"the weights in {directory} are not of the server's model ({'; '.join(problems)}); the old weights stay in"
            " use: give the server the model that the learner trains"
        )


async def update_in_flight(
    client: SGLangClient,
    directory: Path,
    version: int,
    policy: InFlight,
    drained: Callable[[], Awaitable[None]],
    timeout_s: float,
) -> UpdateTimes:
    """Load a version while completions are under way, or, under "drain", once they have ended.

    The server is resumed afterwards, also after an error.

    Args:
        drained: under "drain", returns when no completion of ours runs on the server and none will.

    Raises:
        ServerRefused: the server keeps its weights.
        ServerLost: the server must be restarted.
    """
    begin = time.perf_counter()
    if policy == "drain":
        await drained()
        started = time.perf_counter()
        await client.update_weights(directory, version, flush_cache=True, timeout_s=timeout_s)
        ended = time.perf_counter()
        return UpdateTimes(ended - begin, ended - started)
    retract = policy == "recompute_kv"
    try:
        await client.pause("retract" if retract else "in_place")
        started = time.perf_counter()
        # After an in-place pause the cache is in use: a server that is to flush it then dies.
        await client.update_weights(directory, version, flush_cache=retract, timeout_s=timeout_s)
        ended = time.perf_counter()
    finally:
        try:
            await client.resume()
        except ServerRefused as error:
            raise ServerLost(f"{error}: it may stand still") from error
    return UpdateTimes(time.perf_counter() - begin, ended - started)


def _is_tied(directory: Path) -> bool:
    try:
        return bool(json.loads((directory / "config.json").read_text()).get("tie_word_embeddings", False))
    except (OSError, ValueError):
        return False
