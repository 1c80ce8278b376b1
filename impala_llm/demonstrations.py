"""Demonstrations: recorded episodes in a folder, as trajectories for learning and as text for reading.

    DIR/demonstrations.json         what they were recorded with: see `Header`
    DIR/part-00000.safetensors      the arrays of its episodes, each of the fields of a trajectory end to end
    DIR/part-00000.jsonl            a line for each of them: metadata, numbers of tokens and turns, and the text

docs/demonstrations.md has every field. Nothing is pickled.

Invariant: the lines of a part are renamed into place after its arrays, so a part that has lines is whole. Parts are
never changed: further episodes are recorded into a new part. The arrays carry a checksum of the lines, since only their
order says whose tokens are whose, and one of their own, since a token that is damaged is a token.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from impala_llm.config import ConfigError
from impala_llm.rollout import Turn
from impala_llm.trajectory import ARRAY_FIELDS, METADATA_FIELDS, TOKEN_FIELDS, Trajectory, TrajectoryError
from impala_llm.writable_folders import writing_to

FORMAT = 2
HEADER = "demonstrations.json"
PART_EPISODES = 500
"""Most episodes of a part."""
CHECKSUM = "lines_sha256"
"""Key of the lines' checksum in the metadata of the arrays. Parts that another program has written may have none."""
ARRAYS_CHECKSUM = "arrays_sha256"
"""Key of the arrays' own checksum there. Parts that another program has written may have none."""
_PARTS = "part-*.jsonl"
_PART = re.compile(r"part-([0-9]+)\.jsonl")
_AGAIN = "copy it again, or record into demonstrations.dir=NEW"
_DAMAGES = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors that damaged JSON leads to, a TrajectoryError among them."""


class DemonstrationError(ConfigError):
    """Demonstrations that cannot be used. The message names the folder or file, and the fix."""


@dataclass(frozen=True)
class Header:
    """Model, tokenizer and settings that the demonstrations of a folder were recorded with."""

    env: str
    """Name of the environment."""
    player: str
    """script | policy | person."""
    model: str
    """model.path: whose tokenizer made the ids, and with player=policy who played."""
    tokenizer: str
    """See `fingerprint`."""
    vocab_size: int
    """Ids lie below."""
    settings: dict[str, Any]
    """Settings of the environment and the recording, and with player=policy of the sampling, as nested mappings."""
    weights: int | None = None
    """With player=policy the checksum of its weights, see `model_files.base_checksum`; None: another player."""


@dataclass(frozen=True)
class Demonstration:
    """A recorded episode."""

    trajectory: Trajectory
    source: str
    """Name of the set of tasks that its task id counts, such as `webshop, catalogue 1003`."""
    text: tuple[Turn, ...]
    """The episode as people read it."""

    @property
    def task(self) -> tuple[str, int]:
        return self.source, self.trajectory.task_id


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of vocabulary and chat template: the same for tokenizers that make the same ids of a conversation."""
    content = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template])
    return hashlib.sha256(content.encode()).hexdigest()


def write_header(folder: Path, header: Header) -> None:
    """Begin a folder. Made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"format": FORMAT, **dataclasses.asdict(header)}, indent=1)
    _put(folder / HEADER, lambda aside: aside.write_text(content + "\n"))


def read_header(folder: Path) -> Header:
    """Raises DemonstrationError where there is none of this format."""
    path = folder / HEADER
    try:
        values = json.loads(path.read_bytes())
        for name in ("format", *(f.name for f in dataclasses.fields(Header) if f.default is dataclasses.MISSING)):
            _require(name in values, f"it has no {name}")
        if values.pop("format") != FORMAT:
            raise DemonstrationError(
                f"{path} has another format than {FORMAT}: record the demonstrations again with `impala-llm "
                f"demonstrate demonstrations.dir=NEW`, and name NEW in place of {folder}"
            )
        for key, kind in (("model", str), ("tokenizer", str), ("vocab_size", int), ("settings", dict)):
            _require(isinstance(values[key], kind), f"{key} is {values[key]!r}: {kind.__name__} is expected")
        return Header(**values)
    except NotADirectoryError:
        raise DemonstrationError(
            f"{folder} is a file: name the folder of demonstrations, such as {folder.parent}"
        ) from None
    except FileNotFoundError:
        if has_parts(folder):
            raise DemonstrationError(f"{folder} has parts but no readable {HEADER} (it is missing): {_AGAIN}") from None
        raise DemonstrationError(
            f"{folder} holds no demonstrations ({HEADER} is missing): record some with `impala-llm demonstrate "
            f"{shlex.quote(f'demonstrations.dir={folder}')}` and the settings of the environment, or correct the path"
        ) from None
    except _DAMAGES as error:
        if isinstance(error, DemonstrationError):
            raise
        reason = _reason(error)
        if has_parts(folder):
            raise DemonstrationError(f"{folder} has parts but no readable {HEADER} ({reason}): {_AGAIN}") from None
        raise DemonstrationError(f"{path} cannot be read ({reason}): record the demonstrations again") from None


def add_part(folder: Path, demonstrations: Sequence[Demonstration]) -> None:
    """Add episodes to a folder that has a header. None: nothing is done."""
    if not demonstrations:
        return
    number = 1 + max(map(_number, _parts(folder)), default=-1)
    rows = [d.trajectory for d in demonstrations]
    arrays = {name: np.concatenate([getattr(row, name) for row in rows]) for name in ARRAY_FIELDS}
    # In ASCII: readers take some of Unicode's characters for the end of a line, and a lone surrogate has no UTF-8.
    lines = "".join(json.dumps(_line(d)) + "\n" for d in demonstrations).encode("ascii")
    metadata = {CHECKSUM: hashlib.sha256(lines).hexdigest(), ARRAYS_CHECKSUM: _checksum(arrays)}
    path = folder / f"part-{number:05d}.jsonl"
    _put(path.with_suffix(".safetensors"), lambda aside: save_file(arrays, aside, metadata))
    _put(path, lambda aside: aside.write_bytes(lines))


def has_parts(folder: Path) -> bool:
    """Whether a folder holds demonstrations, whole or damaged."""
    return any(folder.glob(_PARTS))


def read(folder: Path) -> Iterator[Demonstration]:
    """The episodes of a folder in the order in which they were recorded.

    Raises:
        DemonstrationError: a part is missing or damaged, or its lines are not those of its arrays.
    """
    read_header(folder)
    for path in _parts(folder):
        yield from _read_part(path)


def _read_part(path: Path) -> list[Demonstration]:
    lines, checksum = _read_lines(path)
    arrays_path = path.with_suffix(".safetensors")
    try:
        with safe_open(arrays_path, "np") as file:
            if lacking := sorted(ARRAY_FIELDS.keys() - file.keys()):
                raise DemonstrationError(
                    f"{arrays_path} lacks {', '.join(lacking)}: another release has written it; record the "
                    "demonstrations again"
                )
            arrays = {name: file.get_tensor(name) for name in ARRAY_FIELDS}
            metadata = file.metadata() or {}
    except DemonstrationError:
        raise
    except (*_DAMAGES, SafetensorError) as error:
        raise DemonstrationError(
            f"{arrays_path} is missing or damaged ({_reason(error)}): copy it again, or remove {path.name} beside it"
        ) from None
    for name, array in arrays.items():
        key = "num_tokens" if name in TOKEN_FIELDS else "num_turns"
        if array.shape[:1] != (total := sum(values[key] for values in lines),):
            raise DemonstrationError(
                f"{path}: {key} of its {len(lines)} lines is {total} in all, and {name} in {arrays_path.name} has the "
                f"shape {list(array.shape)}: lines are missing or were added; copy both again, or remove this part "
                "(`impala-llm demonstrations --out` filters)"
            )
    if metadata.get(ARRAYS_CHECKSUM, own := _checksum(arrays)) != own:
        raise DemonstrationError(
            f"{arrays_path} has other arrays than were written (their SHA-256 differs): copy it again, or remove "
            f"{path.name} beside it"
        )
    found: list[Demonstration] = []
    token = turn = 0
    for number, values in enumerate(lines, 1):
        ends = token + values["num_tokens"], turn + values["num_turns"]
        fields = {
            name: arrays[name][token : ends[0]] if name in TOKEN_FIELDS else arrays[name][turn : ends[1]]
            for name in ARRAY_FIELDS
        }
        try:
            # One that an earlier release did not write has its default, or is missed.
            row = Trajectory(**fields, **{name: values[name] for name in METADATA_FIELDS if name in values})
            found.append(Demonstration(row, values["source"], tuple(_turn(each) for each in values["text"])))
        except _DAMAGES as error:
            raise _no_demonstration(path, number, error) from None
        token, turn = ends
    if metadata.get(CHECKSUM, checksum) != checksum:
        raise DemonstrationError(
            f"{path} has other lines than {arrays_path.name} was written with (their SHA-256 differs): copy both "
            "again, or remove this part (`impala-llm demonstrations --out` filters)"
        )
    return found


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of the bytes of a part's arrays, in the order of their names."""
    return hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The lines of a part, with what all who read them need, and their SHA-256."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DemonstrationError(f"{path} cannot be read ({error.strerror}): copy it again, or remove it") from None
    found = []
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n") if content else [], 1):
        try:
            values = json.loads(line.decode("utf-8"))
            _require(isinstance(values, dict), "it is no JSON object")
            for key in ("episode_id", "source"):
                _require(isinstance(values[key], str), f"{key} is {values[key]!r}: text is expected")
            for key in ("num_tokens", "num_turns"):
                _require(type(values[key]) is int and values[key] > 0, f"{key} is {values[key]!r}: a count is expected")
            found.append(values)
        except _DAMAGES as error:
            raise _no_demonstration(path, number, error) from None
    return found, hashlib.sha256(content).hexdigest()


def _turn(values: Any) -> Turn:
    turn = Turn(*values)
    are_texts = isinstance(turn.observation, str) and isinstance(turn.action, str)
    _require(are_texts and isinstance(turn.reward, int | float), f"text has {values!r}: text, text, number is expected")
    return turn


def _no_demonstration(path: Path, number: int, error: Exception) -> DemonstrationError:
    return DemonstrationError(
        f"{path}, line {number}, is no demonstration ({_reason(error)}): copy the folder again, or remove this part"
    )


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise TrajectoryError(otherwise)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, TrajectoryError) else f"{type(error).__name__}: {error}"


def _parts(folder: Path) -> list[Path]:
    """The lines of the parts, in the order in which they were recorded."""
    return sorted(folder.glob(_PARTS), key=_number)


def _number(path: Path) -> int:
    """Number of a part. Raises DemonstrationError where the name has none."""
    found = _PART.fullmatch(path.name)
    if found is None:
        raise DemonstrationError(f"{path} has no number as part-00000.jsonl has: rename it, or move it away")
    return int(found[1])


def _line(demonstration: Demonstration) -> dict[str, Any]:
    row = demonstration.trajectory
    return {
        **{name: getattr(row, name) for name in METADATA_FIELDS},
        "num_tokens": row.num_tokens,
        "num_turns": len(row.turns),
        "source": demonstration.source,
        "text": [dataclasses.astuple(turn) for turn in demonstration.text],
    }


def _put(path: Path, write: Any) -> None:
    """Write a file under another name and rename it, so that no process sees an incomplete file."""
    aside = path.with_name(f"{path.name}.new-{os.getpid()}")
    try:
        write(aside)
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)


# --- looking at them


def describe(demonstrations: Sequence[Demonstration]) -> str:
    """A few lines on episodes: how many, of what, how good, how long."""
    rows = [d.trajectory for d in demonstrations]
    scores = np.array([row.score for row in rows])
    tokens = np.array([row.num_tokens for row in rows])
    sources = Counter(d.source for d in demonstrations)
    names = list(sources) if len(sources) <= 3 else [min(sources), "...", max(sources)]
    tenths = Counter(min(9, int(10 * score)) for score in scores)
    histogram = ", ".join(f"{n / 10:.1f} to {(n + 1) / 10:.1f}: {tenths[n]}" for n in sorted(tenths))
    return (
        f"{len(rows)} demonstrations of {len({d.task for d in demonstrations})} tasks "
        f"({'; '.join(names)})\n"
        f"score {scores.mean():.3f}, success {np.mean([row.success for row in rows]):.3f}; scores from {histogram}\n"
        f"{tokens.sum():,} tokens, {tokens.mean():.0f} an episode ({tokens.min()} to {tokens.max()}), of them "
        f"{np.mean([row.num_action_tokens for row in rows]):.0f} in {np.mean([len(row.turns) for row in rows]):.1f} "
        "completions"
    )


def readable(demonstration: Demonstration) -> str:
    """An episode to read."""
    row = demonstration.trajectory
    lines = [f"== {row.episode_id} · {demonstration.source}, task {row.task_id} · score {row.score:.2f}"]
    for turn in demonstration.text:
        lines += [turn.observation.strip(), f"> {turn.said}"]
    # A terminal takes no half of a surrogate pair.
    return "\n".join(lines).encode(errors="backslashreplace").decode()


def main(argv: Sequence[str]) -> int:
    """Run the command `impala-llm demonstrations`. Returns the exit code; 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="impala-llm demonstrations",
        description="Look at recorded demonstrations, and filter them.",
        epilog="`impala-llm demonstrate` records them, `impala-llm sft` learns from them.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--read", type=int, default=0, metavar="N", help="print the first N episodes")
    parser.add_argument("--min-score", type=float, default=0.0, metavar="X", help="only those of at least this score")
    parser.add_argument("--max-score", type=float, default=1.0, metavar="X", help="only those of at most this score")
    parser.add_argument("--out", type=Path, metavar="NEW", help="write them into a new folder")
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:
        return 2 if stop.code else 0
    try:
        if math.isnan(options.min_score) or math.isnan(options.max_score):
            raise DemonstrationError("--min-score and --max-score: give numbers, such as 0.8")
        if options.read < 0:
            raise DemonstrationError(f"--read {options.read}: give a number of episodes, 0 or more")
        header = read_header(options.folder)
        chosen = [d for d in read(options.folder) if options.min_score <= d.trajectory.score <= options.max_score]
        if not chosen and next(read(options.folder), None) is None:
            raise DemonstrationError(
                f"{options.folder} has no recorded episode: record some with `impala-llm demonstrate "
                f"{shlex.quote(f'demonstrations.dir={options.folder}')}` and the settings of the environment"
            )
        if not chosen:
            raise DemonstrationError(
                f"{options.folder} has no demonstration with a score from {options.min_score:g} to "
                f"{options.max_score:g}: widen --min-score and --max-score"
            )
        for demonstration in chosen[: options.read]:
            print(readable(demonstration) + "\n")
        print(f"{options.folder}: env={header.env}, played by {header.player}, tokens of {header.model}")
        print(describe(chosen))
        if options.out is not None:
            aside = options.out.with_name(f"{options.out.name}.new-{os.getpid()}")
            try:
                with writing_to(f"--out {options.out}"):
                    if options.out.exists():
                        raise DemonstrationError(f"--out {options.out} exists: name a new folder")
                    write_header(aside, header)
                    for start in range(0, len(chosen), PART_EPISODES):
                        add_part(aside, chosen[start : start + PART_EPISODES])
                    aside.rename(options.out)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
            print(f"written to {options.out}")
    except ConfigError as error:
        print(f"impala-llm demonstrations: {error}", file=sys.stderr)
        return 2
    return 0
