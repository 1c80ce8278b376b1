"""Versions that the learner puts on the weight boards, and when.

Invariant: whoever waits for a version gets it in the end. A version that readers keep from the board is skipped only
where tickets can do without it; otherwise the learner waits until a reader lets go.

When that is: a ticket that the step from version v takes demands v - η at most (pipeline/admission.py). So a learner
at v whose newest published version is not older than v - η gets its next batch, if no ticket ends without a trajectory.
Where some did, and nothing can come any more, it publishes at once, whenever the next version would be due.

What a learner that is started again goes on from is the newest version on either of two boards: the one of the actors,
and one that learners alone read, for versions that are not published but kept. Each has the value head of that version.
"""

from impala_llm.learning.model import PolicyModel
from impala_llm.pipeline.complaints import Complaints
from impala_llm.pipeline.weights import SlotsInUse, WeightPublisher

PATIENCE_S = 1.0
"""How long a learner stands still for a reader before it goes on without publishing."""


class VersionBoard:
    """Rank 0's versions on the weight boards."""

    def __init__(
        self,
        board: WeightPublisher,
        aside: WeightPublisher,
        model: PolicyModel,
        interval: int | None,
        max_staleness: int | None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """
        Args:
            board: of the actors. aside: of learners alone.
            interval: updates between two versions that are published; None: none after the first.
            max_staleness: η; None: free running.
        """
        self.published: int | None = None
        """The newest version on the board of the actors."""
        self._board = board
        self._aside = aside
        self._model = model
        self._interval = interval
        self._max_staleness = max_staleness
        self._patience_s = patience_s
        self._complaints = Complaints()

    def begin(self, version: int, found: int | None) -> None:
        """Publish the version that training starts from, unless an earlier learner has, and actors are to stay with
        what that has published. found: the newest on their board."""
        self._board.reserve(dict(self._model.policy_tensors()))
        if self._interval != 1:
            self._aside.reserve(dict(self._model.policy_tensors()))
        self.published = found
        if found is None or self._interval is not None:
            self._write(version, may_skip=found == version)
            self.published = version

    def offer(self, version: int) -> bool | None:
        """Publish a version if one is due. False where it was skipped for the sake of readers, None where none is due.

        The next version is due after one that was skipped.
        """
        assert self.published is not None
        behind = version - self.published
        if self._interval is None or behind < self._interval:
            return None
        if not self._write(version, may_skip=self._max_staleness is None or behind <= self._max_staleness):
            return False
        self.published = version
        return True

    def publish_late(self, version: int) -> bool:
        """Publish a version that was not due, or skipped, for a learner that gets no batch without it. What is due
        later stays so. False where readers hold all slots: try again."""
        return self._write(version, may_skip=True)

    def keep(self, version: int) -> None:
        """For a learner that is started again, without publishing it."""
        self._aside.publish(dict(self._model.policy_tensors()), version, extra=self._model.value_head_bytes())

    def _write(self, version: int, may_skip: bool) -> bool:
        while True:
            try:
                tensors, extra = dict(self._model.policy_tensors()), self._model.value_head_bytes()
                self._board.publish(tensors, version, self._patience_s, extra)
                return True
            except SlotsInUse as error:
                fate = "is skipped" if may_skip else "waits"
                self._complaints.log("a version was kept from the board", f"{version} {fate}: {error}")
                if may_skip:
                    return False
