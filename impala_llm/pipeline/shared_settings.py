"""Settings that an actor must have in common with its learner, and how two sides of them are compared.

Both sides are given their settings separately. An actor that plays another task, or samples at another temperature,
would train the policy on what nobody asked for.
"""

import hashlib
from collections.abc import Iterator, Mapping

from impala_llm.settings import Config, leaves, written

_SECTIONS = {
    "run": ("name",),
    "learner": ("num_ranks",),
    "env": (),
    "agent": ("name", "num_tasks", "max_tokens", "tool_parser", "reasoning_parser"),
    "engine": ("temperature", "top_p", "top_k", "max_new_tokens", "max_length"),
    "actor": ("unroll_turns", "unroll_tokens"),
}
"""Of each section the settings that are shared; all of them where none is named."""
_LONGEST = 200
"""Characters of a value; a longer one is represented by its checksum."""
_SHOWN = 3
"""Settings that a refusal names."""


def shared_settings(config: Config) -> dict[str, str]:
    """Return their values as texts, by key. What may be a path is left out, as it may be another on each host."""
    found = {}
    for section, names in _SECTIONS.items():
        for key, value in _flat(f"{section}.", dict(leaves(getattr(config, section)))):
            text = written(value)
            if (not names or key.partition(".")[2] in names) and "/" not in text:
                is_long = len(text) > _LONGEST
                found[key] = f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}" if is_long else text
    return found


def difference(learners: Mapping[str, str], actors: Mapping[str, str], actor: str) -> str:
    """Compare what `shared_settings` has found on both sides.

    Args:
        learners: of the learner.
        actors: of the actor.
        actor: its name.

    Returns:
        A sentence on the settings that differ, with what to do; "" where none does.
    """
    different = [key for key in {**learners, **actors} if learners.get(key) != actors.get(key)]
    if not different:
        return ""
    values = [
        f"{key} is {learners.get(key, 'not set')} at the learner and {actors.get(key, 'not set')} at {actor}"
        for key in different[:_SHOWN]
    ]
    more = f", and {len(different) - _SHOWN} other settings differ" if len(different) > _SHOWN else ""
    return f"{'; '.join(values)}{more}: start the actors with the settings of the learner, as its config.yaml has them"


def _flat(prefix: str, node: Mapping[object, object]) -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value
