"""The tokens of an episode whose conversation may branch: a tree of completions, and the `Trajectory` that it becomes.

Invariant: the tokens of a completion are in exactly one span that is learned from, behind exactly the tokens that they
were sampled after; whatever else stands in the trajectory is context. This module has no I/O and knows no text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from impala_llm.engines.base import Generation
from impala_llm.rollout import EpisodeSpec, arrays_of
from impala_llm.trajectory import CONTEXT_START, Trajectory


@dataclass(eq=False)
class Completion:
    """A completion of the policy, or one that is under way."""

    parent: "Completion | None"
    """The completion whose history this one continues; None: it begins with nothing."""
    read: tuple[int, ...]
    """Tokens that the policy read since then and did not sample."""
    generation: Generation | None = None
    """None while it is under way."""
    limit: int = 0
    """Largest number of its tokens, while it is under way."""
    reward: float = 0.0
    """Reward of this turn, beside that of the episode."""

    @property
    def path(self) -> "list[Completion]":
        """The completions from the first one of its history to itself."""
        found, completion = [self], self.parent
        while completion is not None:
            found.append(completion)
            completion = completion.parent
        return found[::-1]

    @property
    def history(self) -> list[int]:
        """All tokens before its own."""
        tokens: list[int] = []
        for completion in self.path[:-1]:
            tokens += completion.read
            tokens += completion.sampled
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
        generations = ((completion, completion.generation) for completion in self.path)
        return sum(len(c.read) + (c.limit if g is None else len(g.tokens)) for c, g in generations)


class ConversationTree:
    """All completions of an episode."""

    def __init__(self) -> None:
        self.completions: list[Completion] = []
        """Complete ones, in the order in which they ended."""
        self._under_way: list[Completion] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the trajectory that this may become at most, once all that is under way has ended."""
        return sum(completion.num_tokens for completion in self._leaves([*self.completions, *self._under_way]))

    def begin(self, parent: Completion | None, read: Sequence[int], limit: int = 0) -> Completion:
        """Begin a completion.

        Args:
            parent: a completion of this tree, one that has ended, which it continues; None: nothing.
            read: tokens after it, which the policy did not sample. Not empty where there is no parent.
            limit: tokens that it may have.
        """
        if parent is None and not read:
            raise ValueError("read is empty: a first token has no context that predicts it")
        completion = Completion(parent, tuple(read), limit=limit)
        self._under_way.append(completion)
        return completion

    def end(self, completion: Completion, generation: Generation | None) -> bool:
        """End a completion that is under way. Returns whether it has tokens, and is so a part of the tree.

        Args:
            generation: all that was sampled, even if no client waits for it any more; None: nothing was sampled.
        """
        self._under_way.remove(completion)
        if generation is None or not len(generation.tokens):
            return False
        completion.generation = generation
        self.completions.append(completion)
        return True

    def contexts(self) -> list[list[Completion]]:
        """The histories that hold all completions: one for each that no other continues, in the order of their ends.

        The episode's last completion is so the last of all.
        """
        return [leaf.path for leaf in self._leaves(self.completions)]

    def trajectory(
        self, spec: EpisodeSpec, *, reward: float, score: float, success: bool, stats: Mapping[str, float]
    ) -> Trajectory:
        """Lay the episode out, context by context; a completion that several of them hold is learned from in the first.

        Args:
            reward: of the episode, received after its last completion, beside those of the completions.
            score: in [0, 1].

        Raises:
            ValueError: there is no completion.
        """
        contexts = self.contexts()
        if not contexts:
            raise ValueError(
                "the policy sampled no completion in this episode, and there is nothing to learn from: let the agent "
                "send a request through its client (OPENAI_BASE_URL), and see whether each was refused"
            )
        tokens: list[int] = []
        begins: list[int] = []
        learned: dict[int, tuple[int, Generation, float]] = {}
        for context in contexts:
            begins.append(len(tokens))
            for completion in context:
                assert completion.generation is not None
                tokens += completion.read
                learned.setdefault(id(completion), (len(tokens), completion.generation, completion.reward))
                tokens += completion.sampled
        arrays = arrays_of(tokens, list(learned.values()))
        arrays["versions"][begins[1:]] = CONTEXT_START
        arrays["rewards"][-1] += reward
        return Trajectory(
            **arrays, bootstrap=False, score=score, success=success, stats=dict(stats), **spec.trajectory_fields
        )

    @staticmethod
    def _leaves(completions: list[Completion]) -> list[Completion]:
        continued = {id(completion.parent) for completion in completions}
        return [completion for completion in completions if id(completion) not in continued]
