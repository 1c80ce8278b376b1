"""The tokens of an episode whose conversation may branch: a tree of answers, and the `Trajectory` that it becomes.

Invariant: the tokens of an answer are in exactly one span that is learned from, behind exactly the tokens that they
were sampled after; whatever else stands in the trajectory is context. This module has no I/O and knows no text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from impala_llm.engines.base import Generation
from impala_llm.rollout import EpisodeSpec, arrays_of
from impala_llm.trajectory import CONTEXT_START, Trajectory


@dataclass(eq=False)
class Answer:
    """An answer of the policy, or one that is under way."""

    parent: "Answer | None"
    """The answer whose history this one continues; None: it begins with nothing."""
    read: tuple[int, ...]
    """Tokens that the policy read since then and did not sample."""
    generation: Generation | None = None
    """None while it is under way."""
    limit: int = 0
    """Largest number of its tokens, while it is under way."""
    reward: float = 0.0
    """Reward of this turn, beside that of the episode."""

    @property
    def path(self) -> "list[Answer]":
        """The answers from the first one of its history to itself."""
        found, answer = [self], self.parent
        while answer is not None:
            found.append(answer)
            answer = answer.parent
        return found[::-1]

    @property
    def history(self) -> list[int]:
        """All tokens before its own."""
        tokens: list[int] = []
        for answer in self.path[:-1]:
            tokens += answer.read
            tokens += answer.sampled
        return [*tokens, *self.read]

    @property
    def tokens(self) -> list[int]:
        """All tokens up to its end."""
        return [*self.history, *self.sampled]

    @property
    def sampled(self) -> list[int]:
        """Its own tokens; none while it is under way."""
        return [] if self.generation is None else self.generation.tokens.tolist()

    @property
    def num_tokens(self) -> int:
        """Number of tokens up to its end, or that it may have then."""
        generations = ((answer, answer.generation) for answer in self.path)
        return sum(len(a.read) + (a.limit if g is None else len(g.tokens)) for a, g in generations)


class ConversationTree:
    """All answers of an episode."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        """Complete ones, in the order in which they ended."""
        self._under_way: list[Answer] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the trajectory that this may become at most, once all that is under way has ended."""
        return sum(answer.num_tokens for answer in self._leaves([*self.answers, *self._under_way]))

    def begin(self, parent: Answer | None, read: Sequence[int], limit: int = 0) -> Answer:
        """Begin an answer.

        Args:
            parent: a complete answer of this tree that it continues; None: nothing.
            read: tokens after it, which the policy did not sample. Not empty where there is no parent.
            limit: tokens that it may have.
        """
        if parent is None and not read:
            raise ValueError("read is empty: a first token has no context that predicts it")
        answer = Answer(parent, tuple(read), limit=limit)
        self._under_way.append(answer)
        return answer

    def end(self, answer: Answer, generation: Generation | None) -> bool:
        """End an answer that is under way. Returns whether it has tokens, and is so a part of the tree.

        Args:
            generation: all that was sampled, even if no client waits for it any more; None: nothing was sampled.
        """
        self._under_way.remove(answer)
        if generation is None or not len(generation.tokens):
            return False
        answer.generation = generation
        self.answers.append(answer)
        return True

    def contexts(self) -> list[list[Answer]]:
        """The histories that hold all answers: one for each answer that no other continues, in the order of their ends.

        The episode's last answer is so the last of all.
        """
        return [leaf.path for leaf in self._leaves(self.answers)]

    def trajectory(
        self, spec: EpisodeSpec, *, reward: float, score: float, success: bool, stats: Mapping[str, float]
    ) -> Trajectory:
        """Lay the episode out, context by context; an answer that several of them hold is learned from in the first.

        Args:
            reward: of the episode, received after its last answer, beside those of the answers.
            score: in [0, 1].

        Raises:
            ValueError: there is no answer.
        """
        contexts = self.contexts()
        if not contexts:
            raise ValueError(
                "the policy gave no answer in this episode, and there is nothing to learn from: let the agent send a "
                "request through its client (OPENAI_BASE_URL), and see whether each was refused"
            )
        tokens: list[int] = []
        begins: list[int] = []
        learned: dict[int, tuple[int, Generation, float]] = {}
        for context in contexts:
            begins.append(len(tokens))
            for answer in context:
                assert answer.generation is not None
                tokens += answer.read
                learned.setdefault(id(answer), (len(tokens), answer.generation, answer.reward))
                tokens += answer.sampled
        arrays = arrays_of(tokens, list(learned.values()))
        arrays["versions"][begins[1:]] = CONTEXT_START
        arrays["rewards"][-1] += reward
        return Trajectory(
            **arrays, bootstrap=False, score=score, success=success, stats=dict(stats), **spec.trajectory_fields
        )

    @staticmethod
    def _leaves(answers: list[Answer]) -> list[Answer]:
        continued = {id(answer.parent) for answer in answers}
        return [answer for answer in answers if id(answer) not in continued]
