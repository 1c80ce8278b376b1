"""Small trajectories for the tests of this folder."""

import json
import math
from collections.abc import Sequence

import numpy as np

from impala_llm.replay import ReplayBuffer
from impala_llm.trajectory import Trajectory


def make_trajectory(
    version: int = 0,
    newest_version: int | None = None,
    ticket_id: int = 0,
    group_id: int = 0,
    signature: str = "",
    score: float = 0.0,
    length: int = 4,
) -> Trajectory:
    """`length` tokens, all actions but the first; 17 bytes a token and 8 for its one turn."""
    mask = np.arange(length) > 0
    versions = np.where(mask, version, -1).astype(np.int32)
    versions[-1] = version if newest_version is None else newest_version
    return Trajectory(
        tokens=np.arange(length, dtype=np.int32),
        action_mask=mask,
        behaviour_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=versions,
        rewards=np.zeros(length, np.float32),
        turns=np.array([[1, length]], np.int32),
        bootstrap=False,
        episode_id=f"episode-{ticket_id}",
        group_id=group_id,
        task_id=0,
        env="toy",
        actor_id="actor",
        ticket_id=ticket_id,
        signature=signature,
        score=score,
        success=score == 1.0,
        stats={"length": float(length)},
    )


def weights_by_definition(
    buffer: ReplayBuffer, *classes: tuple[Sequence[int], Sequence[float], int], exponent: float = 1.0
) -> dict[int, float]:
    """The next draw of a buffer, by the definition: importance weight of each item that is drawn.

    The smallest E/P are drawn, with the exponentials E that the buffer's generator gives next. An item below the first
    value τ that is not drawn had the chance 1 - e^(-P τ), and all of them have it where nothing is left. The weights of
    a class have mean 1 before the exponent, and the largest of all is 1.

    Args:
        classes: (ids, P, number to draw) each.
    """
    rng = np.random.default_rng()
    rng.bit_generator.state = json.loads(buffer.state_dict()["generator"])
    weights: dict[int, float] = {}
    for ids, p, num_items in classes:
        values = rng.standard_exponential(len(p)) / (np.array(p) / sum(p))
        order = np.argsort(values)
        threshold = values[order[num_items]] if num_items < len(p) else math.inf
        chosen = order[:num_items]
        inverse = 1.0 / (1.0 - np.exp(-(np.array(p) / sum(p))[chosen] * threshold))
        weights |= {ids[place]: weight for place, weight in zip(chosen, inverse / inverse.mean(), strict=True)}
    largest = max(weights.values())
    return {item_id: (weight / largest) ** exponent for item_id, weight in weights.items()}


def assert_draw(buffer: ReplayBuffer, p: Sequence[float], version: int, ids: Sequence[int] | None = None) -> None:
    """Draw all items but one: which ones, and their weights, follow from the definition. p: of each item, in order."""
    expected = weights_by_definition(buffer, (range(len(p)) if ids is None else ids, p, len(p) - 1))
    sample = buffer.sample(len(p) - 1, version)
    assert sample.item_ids.tolist() == list(expected)
    np.testing.assert_allclose(sample.weights, list(expected.values()), rtol=1e-6)
