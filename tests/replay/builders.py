"""Small trajectories for the tests of this folder."""

import numpy as np

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
        behaviour_log_probs=np.where(mask, -0.5, 0.0).astype(np.float32),
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
