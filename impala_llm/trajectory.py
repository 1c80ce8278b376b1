"""Trajectory: an episode, or an unroll of one, as the model saw it.

It is a row of tokens that was never re-tokenised, with the log-probability under the behaviour policy of each token
that this policy sampled (an unroll is the n-step part of IMPALA, arXiv 1802.01561). This module has no I/O.

Invariant: a `Trajectory` that exists is valid. Construction checks every field, so that channel, replay and learner do
not check again; only the vocabulary, which is not part of it, is checked by the receiver with `validate_vocabulary`.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_origin

import numpy as np

TOKEN_FIELDS: dict[str, np.dtype] = {
    "tokens": np.dtype(np.int32),
    "behaviour_log_probs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
    "rewards": np.dtype(np.float32),
    "action_mask": np.dtype(np.bool_),
}
"""Array fields with an item for each token, and its dtype, of 4 bytes or of 1."""
TURN_FIELDS: dict[str, np.dtype] = {"turns": np.dtype((np.int32, 2))}
"""Array fields with an item for each turn, and its dtype, of items of 4 bytes or of 1."""
ARRAY_FIELDS = dict(sorted({**TOKEN_FIELDS, **TURN_FIELDS}.items(), key=lambda field: -field[1].base.itemsize))
"""All array fields, in the order in which they lie in memory: end to end, the bytes last."""

FIELD_STARTS: dict[str, tuple[int, int]] = {}
"""Start of each array in a block: so many bytes for each token, and so many for each turn."""
TOKEN_BYTES = TURN_BYTES = 0
for _name, _dtype in ARRAY_FIELDS.items():
    assert _dtype.base.str in ("<i4", "<f4", "|b1", "|u1", "|i1"), (
        f"{_name} has {_dtype.base}: 4 bytes or 1 are possible"
    )
    FIELD_STARTS[_name] = TOKEN_BYTES, TURN_BYTES
    if _name in TOKEN_FIELDS:
        TOKEN_BYTES += _dtype.itemsize
    else:
        TURN_BYTES += _dtype.itemsize

NO_VERSION = -1
"""Version of a token that no policy sampled: prompts and observations."""
CONTEXT_START = -2
"""Version of a token that no policy sampled and with which a context begins anew, see `Trajectory`."""
MAX_TICKETS = 1 << 48
"""Ticket ids lie below."""
MAX_UNROLLS = 1 << 15
"""Indices of unrolls lie below, so that an `unroll_id` is a number of 63 bits."""


_new, _set = object.__new__, object.__setattr__


class TrajectoryError(ValueError):
    """A malformed trajectory. The message names the field, the value and what is expected."""


def unroll_id(ticket_id: int, unroll_index: int) -> int:
    """One number for an unroll of a ticket's episode: the ticket's id itself for the first, or only, one."""
    return ticket_id + unroll_index * MAX_TICKETS


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Trajectory:
    """One episode, or an unroll of one. T tokens, K turns.

    An unroll has the whole history before its own turns as context, without action tokens. One after which the episode
    continues has no score. One that is bootstrapped ends with the observation that the next turn would answer.

    An episode whose turns saw different histories, since its agent compacted or branched the conversation, lies here
    context by context: a token of version CONTEXT_START, and all up to the next such token, see nothing of what is
    before it. Tokens that several contexts share stand in each of them, and are actions in one of them alone.

    The arrays lie end to end in one block, so that a trajectory moves in one copy: construction copies them together,
    unless they lie so already.

    Raises:
        TrajectoryError: on construction, when a field is malformed or fields disagree.
    """

    tokens: np.ndarray
    """int32[T]: prompt, observation and action tokens in the order in which the model saw them."""
    action_mask: np.ndarray
    """bool[T]: True where the behaviour policy sampled the token."""
    behaviour_log_probs: np.ndarray
    """float32[T]: log μ(token) in nats at the sampling temperature, as the engine reported it; 0 elsewhere. In a
    `PackedBatch` those of the action tokens alone have this name."""
    versions: np.ndarray
    """int32[T]: policy version that sampled the token; elsewhere -1, or -2 where a further context begins. May change
    inside one completion."""
    rewards: np.ndarray
    """float32[T]: reward received after the token at that index (the last token of a turn); 0 elsewhere."""
    turns: np.ndarray
    """int32[K, 2]: [start, end) of each action span, in order."""
    ticket_id: int
    group_id: int
    task_id: int
    unroll_index: int = 0
    episode_id: str
    env: str
    actor_id: str
    signature: str = ""
    """Kind of task, such as a product's query; rarity counts trajectories of a kind."""
    score: float
    """Final score of the episode, in [0, 1]."""
    bootstrap: bool
    """True if the episode continues, or was cut, after the last token, so that its value must be bootstrapped."""
    success: bool
    continues: bool = False
    """True where another unroll of the episode follows."""
    stats: dict[str, float] = field(default_factory=dict)
    block: np.ndarray = field(init=False, repr=False)
    """uint64[n]: the arrays in the order of ARRAY_FIELDS without gaps, then zeros up to a multiple of 8 bytes."""

    def __copy__(self) -> "Trajectory":
        return dataclasses.replace(self)

    def __deepcopy__(self, memo: dict[int, object]) -> "Trajectory":
        """A plain one, with arrays of its own."""
        metadata = {name: getattr(self, name) for name in METADATA_FIELDS}
        arrays = {name: getattr(self, name).copy() for name in ARRAY_FIELDS}
        return Trajectory(**arrays, **metadata | {"stats": dict(self.stats)})

    def __post_init__(self) -> None:
        for name, dtype in ARRAY_FIELDS.items():
            _check_array(name, getattr(self, name), dtype)
        num_tokens = len(self.tokens)
        if num_tokens == 0:
            raise TrajectoryError("tokens is empty: a trajectory holds at least one action token")
        for name in ARRAY_FIELDS:
            like = "tokens" if name in TOKEN_FIELDS else "turns"
            if len(getattr(self, name)) != len(getattr(self, like)):
                raise TrajectoryError(
                    f"{name} has length {len(getattr(self, name))}, {like} has {len(getattr(self, like))}: lengths "
                    "must agree"
                )
        if self.tokens.min() < 0:
            raise TrajectoryError(f"tokens holds the negative id {int(self.tokens.min())}: ids start at 0")
        mask = self.action_mask
        if not mask.any():
            raise TrajectoryError("action_mask is False everywhere: there is no action to learn from")
        if mask[0]:
            raise TrajectoryError("action_mask is True at index 0: a first token has no context that predicts it")
        self._check_turns()
        action_versions = self.versions[mask]
        if action_versions.min() < 0:
            raise TrajectoryError(f"versions is {int(action_versions.min())} on an action token: it must be >= 0")
        others = self.versions[~mask]
        if ((others != NO_VERSION) & (others != CONTEXT_START)).any():
            raise TrajectoryError(
                f"versions must be {NO_VERSION} wherever action_mask is False, {CONTEXT_START} where a context begins"
            )
        for name, dtype in ARRAY_FIELDS.items():
            if dtype.base.kind == "f" and not np.isfinite(getattr(self, name)).all():
                raise TrajectoryError(f"{name} holds a value that is not finite")
        log_probs = self.behaviour_log_probs
        if log_probs.max() > 1e-4:  # float32 log-softmax of a certain token may round a hair above 0
            raise TrajectoryError(f"behaviour_log_probs reaches {float(log_probs.max())}: log-probabilities are <= 0")
        if log_probs[~mask].any():
            raise TrajectoryError("behaviour_log_probs must be 0 wherever action_mask is False")
        if self.rewards[~mask].any():
            raise TrajectoryError("rewards must be 0 wherever action_mask is False: a reward follows an action")
        self._check_metadata()
        self._lay_end_to_end()

    def _lay_end_to_end(self) -> None:
        arrays = {name: getattr(self, name) for name in ARRAY_FIELDS}
        block = _common_block(list(arrays.values()))
        if block is None:
            block = np.zeros(block_words(len(self.tokens), len(self.turns)), np.uint64)
            for name, view in block_views(block, len(self.tokens), len(self.turns)).items():
                view[:] = arrays[name]
                object.__setattr__(self, name, view)
        object.__setattr__(self, "block", block)

    def _check_turns(self) -> None:
        """The spans of `turns` are in order, disjoint and cover exactly the action tokens."""
        turns = self.turns
        starts, ends = turns[:, 0], turns[:, 1]
        if (starts >= ends).any() or (starts[1:] < ends[:-1]).any():
            raise TrajectoryError(
                f"turns must be non-empty, ordered and disjoint [start, end) spans, got {turns.tolist()}"
            )
        num_tokens = len(self.tokens)
        if len(turns) and (starts[0] < 0 or ends[-1] > num_tokens):
            raise TrajectoryError(f"turns reaches outside of the {num_tokens} tokens: {turns.tolist()}")
        edges = np.zeros(num_tokens + 1, np.int32)
        np.add.at(edges, starts, 1)
        np.add.at(edges, ends, -1)
        if (edges.cumsum()[:-1].astype(bool) != self.action_mask).any():
            raise TrajectoryError("turns must cover exactly the tokens where action_mask is True")

    def _check_metadata(self) -> None:
        for name, kind in METADATA_FIELDS.items():
            value = getattr(self, name)
            # bool is an int to isinstance, and an int is a fine float
            accepted = isinstance(value, kind) or (kind is float and isinstance(value, int))
            if not accepted or (kind is not bool and isinstance(value, bool)):
                raise TrajectoryError(f"{name} is {value!r}, a {type(value).__name__}: {kind.__name__} is expected")
            if kind is int and not -(2**63) <= value < 2**63:
                raise TrajectoryError(f"{name} is {value}: a record has 64 bits for it")
        if self.ticket_id < 0:
            raise TrajectoryError(f"ticket_id is {self.ticket_id}: tickets count from 0")
        if not self.episode_id:
            raise TrajectoryError("episode_id is empty: it names the episode for ever")
        if not 0 <= self.unroll_index < MAX_UNROLLS:
            raise TrajectoryError(f"unroll_index is {self.unroll_index}: it must lie in [0, {MAX_UNROLLS})")
        if self.continues and not self.bootstrap:
            raise TrajectoryError(
                "continues is True and bootstrap is False: an episode that goes on has a value to come"
            )
        if not 0.0 <= self.score <= 1.0:
            raise TrajectoryError(f"score is {self.score}: it must lie in [0, 1]")
        for key, value in self.stats.items():
            if key == "":
                raise TrajectoryError(f"stats has a name that is empty, of the value {value!r}: name each number")
            if not isinstance(key, str) or not isinstance(value, int | float):
                raise TrajectoryError(f"stats[{key!r}] is {value!r}: names map to numbers")

    def validate_vocabulary(self, vocab_size: int) -> None:
        """Raise `TrajectoryError` if a token id is not in [0, vocab_size)."""
        largest = int(self.tokens.max())
        if largest >= vocab_size:
            raise TrajectoryError(f"tokens holds id {largest}: the vocabulary has {vocab_size} entries")

    @property
    def unroll_id(self) -> int:
        """See `unroll_id`."""
        return unroll_id(self.ticket_id, self.unroll_index)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_action_tokens(self) -> int:
        return int(self.action_mask.sum())

    @property
    def oldest_version(self) -> int:
        """Smallest policy version among the action tokens."""
        # NO_VERSION and CONTEXT_START, of all other tokens, are the largest of the unsigned numbers.
        return int(self.versions.view(np.uint32).min())

    @property
    def newest_version(self) -> int:
        """Largest policy version among the action tokens."""
        return int(self.versions.max())

    @property
    def context_lengths(self) -> np.ndarray:
        """int64[C]: tokens of each context, of which there is mostly one."""
        starts = np.flatnonzero(self.versions[1:] == CONTEXT_START) + 1
        return np.diff(starts, prepend=0, append=len(self.versions))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, without metadata."""
        return block_bytes(len(self.tokens), len(self.turns))


def _kind(annotation: Any) -> type:
    kind: type = get_origin(annotation) or annotation
    return kind


METADATA_FIELDS = {
    part.name: _kind(part.type) for part in dataclasses.fields(Trajectory) if part.type is not np.ndarray
}
"""Metadata fields and their Python types, in the order of the record."""


_LOADABLE = frozenset((*ARRAY_FIELDS, *METADATA_FIELDS, "block"))


class DeferredTrajectory(Trajectory):
    """A trajectory whose fields are asked for by name, each at its first use. A class of its own, since a class with
    `__getattr__` finds all of its attributes several times slower."""

    __slots__ = ("_load",)
    _load: Callable[[str], object]

    @classmethod
    def of(cls, load: Callable[[str], object], ticket_id: int) -> "DeferredTrajectory":
        """load(name) is a field's value. Nothing is checked here: for callers that have validated its bytes by other
        means."""
        trajectory = _new(cls)
        _set(trajectory, "_load", load)
        _set(trajectory, "ticket_id", ticket_id)
        return trajectory

    def __getattr__(self, name: str) -> Any:
        # Called only for what has no value yet.
        if name not in _LOADABLE:
            raise AttributeError(f"a Trajectory has no {name!r}")
        value = self._load(name)
        _set(self, name, value)
        return value


def block_bytes(num_tokens: int, num_turns: int) -> int:
    """Bytes of the arrays of T tokens and K turns."""
    return TOKEN_BYTES * num_tokens + TURN_BYTES * num_turns


def block_words(num_tokens: int, num_turns: int) -> int:
    """Length of their block, in words of 8 bytes."""
    return -(-block_bytes(num_tokens, num_turns) // 8)


def block_views(block: np.ndarray, num_tokens: int, num_turns: int) -> dict[str, np.ndarray]:
    """The arrays in a block, by name, in the order of ARRAY_FIELDS. block: uint64[block_words(T, K)] or longer."""
    views = {}
    start = 0
    for name, dtype in ARRAY_FIELDS.items():
        num_items = num_tokens if name in TOKEN_FIELDS else num_turns
        views[name] = np.ndarray((num_items, *dtype.shape), dtype.base, block, start)
        start += views[name].nbytes
    return views


def _common_block(arrays: list[np.ndarray]) -> np.ndarray | None:
    """The block in which these arrays lie already, as those of another trajectory do; else None."""
    block = arrays[0].base
    if not isinstance(block, np.ndarray) or block.dtype != np.uint64 or not block.flags.c_contiguous:
        return None
    address = begin = _address(block)
    for array in arrays:
        if array.base is not block or _address(array) != address or not array.flags.c_contiguous:
            return None
        address += array.nbytes
    return block if -(-(address - begin) // 8) == block.size else None


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _check_array(name: str, value: object, dtype: np.dtype) -> None:
    if not isinstance(value, np.ndarray):
        raise TrajectoryError(f"{name} is a {type(value).__name__}: a numpy array of {dtype.base} is expected")
    if value.dtype != dtype.base:
        raise TrajectoryError(f"{name} has dtype {value.dtype}: {dtype.base} is expected")
    if value.ndim != 1 + dtype.ndim:
        raise TrajectoryError(f"{name} has {value.ndim} dimensions: {1 + dtype.ndim} expected")
    if value.shape[1:] != dtype.shape:
        raise TrajectoryError(f"{name} has shape {list(value.shape)}: {[len(value), *dtype.shape]} is expected")
