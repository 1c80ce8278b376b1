"""Settings that an actor must have in common with its learner, and how two sides of them are compared.

Both sides are given their settings separately. An actor that plays another task, or samples at another temperature,
would train the policy on what nobody asked for.
"""

import hashlib
from collections.abc import Iterator, Mapping

from impala_llm.settings import Config, leaves, written

_SHARED = (
    *("run.name", "learner.num_ranks", "env.", "actor.unroll_turns", "actor.unroll_tokens"),
    *("agent.name", "agent.num_tasks", "agent.max_tokens", "agent.tool_parser", "agent.reasoning_parser"),
    *("engine.temperature", "engine.top_p", "engine.top_k", "engine.max_new_tokens", "engine.max_length"),
)
"""Settings, and beginnings of settings, that both sides must have in common."""
_LONGEST = 200
"""Characters of a value; a longer one is represented by its checksum."""
_PATH = "/"
"""Stands for a value that may be a path: no other value has a slash."""
_SHOWN = 3
"""Settings that a refusal names."""


def shared_settings(config: Config) -> dict[str, str]:
    """Return their values as texts, by key. What may be a path, and so another on each host, is only marked."""
    return {key: _text(written(value)) for key, value in _flat("", dict(leaves(config))) if key.startswith(_SHARED)}


def difference(learners: Mapping[str, str], actors: Mapping[str, str], actor: str) -> str:
    """Compare what `shared_settings` has found on both sides.

    Args:
        learners: of the learner.
        actors: of the actor.
        actor: its name.

    Returns:
        A sentence on the settings that differ, with what to do; "" where none does.
    """
    pairs = {key: (learners.get(key), actors.get(key)) for key in {**learners, **actors}}
    different = [key for key, (one, other) in pairs.items() if one != other and _PATH not in (one, other)]
    if not different:
        return ""
    values = [
        f"{key} is {learners.get(key, 'not set')} at the learner and {actors.get(key, 'not set')} at {actor}"
        for key in different[:_SHOWN]
    ]
    more = f", and {len(different) - _SHOWN} other settings differ" if len(different) > _SHOWN else ""
    return f"{'; '.join(values)}{more}: start the actors with the settings of the learner, as its config.yaml has them"


def _text(value: str) -> str:
    if "/" in value:
        return _PATH
    return value if len(value) <= _LONGEST else f"sha256 {hashlib.sha256(value.encode()).hexdigest()[:16]}"


def _flat(prefix: str, node: Mapping[object, object]) -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value
