"""CURVE keys: makes them, stores them, and refuses those that are not safe to use.

Invariant: a secret key lies in a file of mode 0600 in a folder of mode 0700, both of this user, from its first byte on;
no key is ever overwritten; a secret is never printed.

A folder on the learner's host (an actor's host has copies of the two files marked *):

    learner.secret.json
    learner.public.json *           by which actors recognise the learner
    NAME.secret.json *              of the actors on one host; may be deleted here once it is there
    authorised/NAME.public.json     actors that may connect; NAME is their name in the learner's log

Each file is a JSON object: "format", "public_key" and, in secret files, "secret_key", both as 40 characters of Z85
(ZeroMQ RFC 32). Deleting a file from authorised/ revokes that key: later connections are refused, existing
ones stay until they break. A file added there is valid at once. Neither needs a restart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import stat
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from impala_llm.hosts import (
    AUTHORISED,
    LEARNER_PUBLIC,
    LEARNER_SECRET,
    PUBLIC_SUFFIX,
    SECRET_SUFFIX,
    actor_secrets,
)
from impala_llm.pipeline.shm.run_directory import check_name
from impala_llm.processes.limited_warnings import RateLimitedWarnings

_FORMAT = "impala_llm CURVE key 1"
_KEY_CHARACTERS = 40
_MAX_FILE_BYTES = 4096
_DEFAULT_ACTOR = "actor"


class KeyFileError(ValueError):
    """Keys that are missing, malformed, or open to others. The message names the file and the fix."""


@dataclass(frozen=True)
class LearnerKeys:
    """Keys of a learner.

    Attributes:
        secret, public: its own key pair, Z85, 40 bytes each.
        authorised: folder of the public keys of its actors.
    """

    secret: bytes = field(repr=False)
    public: bytes
    authorised: Path


@dataclass(frozen=True)
class ActorKeys:
    """Keys of an actor.

    Attributes:
        secret, public: its own key pair, Z85, 40 bytes each.
        learner: the learner's public key, Z85, 40 bytes.
    """

    secret: bytes = field(repr=False)
    public: bytes
    learner: bytes


def make_keys(directory: Path, actors: Sequence[str] = (_DEFAULT_ACTOR,)) -> None:
    """Make a key pair for each named actor, and the learner's where the folder has none yet.

    Args:
        directory: folder of the keys, made if missing.
        actors: names.

    Raises:
        KeyFileError: an actor has a key already, or the folder is open to others. Nothing was made.
        ValueError: a name cannot be part of a file name, or is used twice.
    """
    for name in actors:
        if check_name("actor", name) == "learner" or actors.count(name) > 1:
            raise ValueError(f"actor name {name!r} is taken: give each actor host a name of its own, not 'learner'")
    authorised = directory / AUTHORISED
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(directory, "chmod 700")
    authorised.mkdir(mode=0o700, exist_ok=True)
    for name in actors:
        for path in (directory / (name + SECRET_SUFFIX), authorised / (name + PUBLIC_SUFFIX)):
            if os.path.lexists(path):
                raise KeyFileError(_exists(path))
    if os.path.lexists(directory / LEARNER_SECRET):
        load_learner_keys(directory)
    else:
        _write_pair(directory / LEARNER_SECRET, directory / LEARNER_PUBLIC)
    for name in actors:
        _write_pair(directory / (name + SECRET_SUFFIX), authorised / (name + PUBLIC_SUFFIX))


def load_learner_keys(directory: Path) -> LearnerKeys:
    """Load the keys of a learner, and check those of its actors.

    Args:
        directory: folder with the key files; a leading ~ is expanded.

    Returns:
        The learner's pair, and the folder of the keys that it accepts.

    Raises:
        KeyFileError: a key, or an authorised one, is missing, malformed or open to others.
    """
    directory = directory.expanduser()
    secret, public = _read_secret(directory / LEARNER_SECRET)
    _check_same(directory / LEARNER_PUBLIC, public)
    authorised = directory / AUTHORISED
    if not authorised.is_dir():
        raise KeyFileError(f"{authorised} is not a folder: make it and put the public keys of the actors into it")
    for path in authorised.glob(f"*{PUBLIC_SUFFIX}"):
        _read_authorised(path)
    return LearnerKeys(secret, public, authorised)


def load_actor_keys(directory: Path, name: str | None = None) -> ActorKeys:
    """Load the keys of an actor and the public key of its learner.

    Args:
        directory: folder with the key files; a leading ~ is expanded.
        name: of the actor; None: the only one in the folder.

    Raises:
        KeyFileError: a key is missing, malformed or open to others.
    """
    directory = directory.expanduser()
    if name is None:
        found = actor_secrets(directory)
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise KeyFileError(
                f"{directory} must hold the secret key of one actor, and has {names}: copy the one of this host, made "
                f"by `impala-llm keys`, and {LEARNER_PUBLIC} into a folder of their own and set pipeline.keys to it"
            )
        path = found[0]
    else:
        path = directory / (name + SECRET_SUFFIX)
    secret, public = _read_secret(path)
    return ActorKeys(secret, public, _read_public(directory / LEARNER_PUBLIC))


class AuthorisedKeys:
    """Public keys in a folder, read again when a file in it was added, removed or changed. For one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: list[tuple[str, int, int, int]] | None = None
        self._names: dict[bytes, str] = {}
        self._warnings = RateLimitedWarnings()

    def name(self, public_key: bytes) -> str | None:
        """Find the name that a key belongs to. Files that cannot be used authorise no key.

        Args:
            public_key: Z85, 40 bytes.

        Returns:
            None where the key is not authorised.
        """
        try:
            seen = self._look()
        except OSError as error:
            self._warnings.log("nobody is authorised", f"{self._folder} cannot be read: {error}")
            return None
        if seen != self._seen:
            self._names = {}
            for file_name, *_ in seen:
                try:
                    key, name = _read_authorised(self._folder / file_name)
                    self._names.setdefault(key, name)
                except KeyFileError as error:
                    self._warnings.log("an authorised key was left out", str(error))
            self._seen = seen
        return self._names.get(public_key)

    def _look(self) -> list[tuple[str, int, int, int]]:
        # The folder's own time of change does not tell of a file that was overwritten.
        seen = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if not entry.name.endswith(PUBLIC_SUFFIX):
                    continue
                # A file that is removed meanwhile, or a broken link, is left out.
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    seen.append((entry.name, status.st_ino, status.st_mtime_ns, status.st_size))
        return sorted(seen)


def main(argv: Sequence[str]) -> int:
    """Run the command `impala-llm keys`. Returns the exit code; 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="impala-llm keys",
        description="Make the keys with which actors on other hosts and the learner know each other and encrypt what "
        "they send. Again with other names: adds actors; the learner's key stays.",
        epilog="To revoke a key, delete its file from DIR/authorised/: it opens no connection from then on, without a "
        "restart; one that stands stays until it breaks. To renew one, delete its two files and make it again.",
    )
    parser.add_argument("--dir", required=True, type=Path, help="folder of the keys on the learner's host")
    parser.add_argument(
        "--actors",
        default=_DEFAULT_ACTOR,
        metavar="NAME,NAME,...",
        help="a name for each host with actors, each gets its own key; default: %(default)s",
    )
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:
        return 2 if stop.code else 0
    directory, actors = options.dir.expanduser(), options.actors.split(",")
    try:
        make_keys(directory, actors)
    except OSError as error:
        print(f"impala-llm keys: --dir {directory}: {error.strerror}: name another folder", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"impala-llm keys: {error}", file=sys.stderr)
        return 2
    print(_what_goes_where(directory, actors))
    return 0


def _what_goes_where(directory: Path, actors: Sequence[str]) -> str:
    def path(*parts: str) -> str:
        return shlex.quote(str(directory.joinpath(*parts)))

    lines = [
        f"{path()}: keys of the learner and of {', '.join(actors)}",
        "the learner's host keeps this folder and trains with",
        f"  pipeline.keys={path()} pipeline.bind=tcp://0.0.0.0:7400",
    ]
    for name in actors:
        lines += [
            f"the host of {name} needs {name}{SECRET_SUFFIX} and {LEARNER_PUBLIC}, for example by",
            f"  ssh {name} mkdir -m 700 impala_keys && "
            f"scp -p {path(name + SECRET_SUFFIX)} {path(LEARNER_PUBLIC)} {name}:impala_keys/",
        ]
    lines += [
        "and starts actors with",
        "  pipeline.keys=impala_keys pipeline.bind=null pipeline.connect=tcp://LEARNER_HOST:7400",
        f"to revoke a key, delete NAME{PUBLIC_SUFFIX} from {path(AUTHORISED)}: good for new connections at once",
    ]
    return "\n".join(lines)


def _exists(path: Path) -> str:
    return (
        f"{path} exists, and keys are not overwritten: give the new actor another name with --actors, or, to renew "
        f"this key, delete NAME{SECRET_SUFFIX} and {AUTHORISED}/NAME{PUBLIC_SUFFIX} first"
    )


def _write_pair(secret_path: Path, public_path: Path) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    _write(secret_path, {"format": _FORMAT, "public_key": public, "secret_key": secret}, 0o600)
    _write(public_path, {"format": _FORMAT, "public_key": public}, 0o644)


def _write(path: Path, content: dict[str, str], mode: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileExistsError:
        raise KeyFileError(_exists(path)) from None
    with open(handle, "w") as file:
        file.write(json.dumps(content, indent=2) + "\n")


def _check_private(path: Path, fix: str, handle: int | None = None) -> None:
    """Check that only this user can use a file or folder.

    Args:
        fix: command that mends its mode.
        handle: descriptor of the open file, which cannot be replaced meanwhile; None: the path is checked.

    Raises:
        KeyFileError: others can use it.
    """
    status = os.stat(path) if handle is None else os.fstat(handle)
    if status.st_uid != os.geteuid():
        raise KeyFileError(
            f"{path} belongs to user {status.st_uid}, and this process runs as {os.geteuid()}: "
            f"make it yours with `chown {os.geteuid()} {path}`, or make new keys as this user"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise KeyFileError(f"{path} has mode {mode:04o} and is open to others: run `{fix} {path}`")


def _read_secret(path: Path) -> tuple[bytes, bytes]:
    """Read the secret and public key of a file that only this user can use, in a folder for which the same holds."""
    if path.parent.is_dir():
        _check_private(path.parent, "chmod 700")
    content = _read(path, secret=True)
    secret, public = _key(path, content, "secret_key"), _key(path, content, "public_key")
    if zmq.curve_public(secret) != public:
        raise KeyFileError(f"{path} is malformed: its public_key does not belong to its secret_key; make new keys")
    return secret, public


def _read_public(path: Path) -> bytes:
    return _key(path, _read(path, secret=False), "public_key")


def _read_authorised(path: Path) -> tuple[bytes, str]:
    try:
        name = check_name("actor", path.name.removesuffix(PUBLIC_SUFFIX))
    except ValueError as error:
        raise KeyFileError(f"{path} cannot name an actor: {error}") from None
    return _read_public(path), name


def _check_same(path: Path, public: bytes) -> None:
    if _read_public(path) != public:
        raise KeyFileError(
            f"{path} does not belong to {LEARNER_SECRET} beside it: actors that trust it would not find this learner; "
            "put the right one back, or make new keys in an empty folder"
        )


def _read(path: Path, secret: bool) -> object:
    try:
        with open(path, "rb") as file:
            if secret:
                _check_private(path, "chmod 600", file.fileno())
            text = file.read(_MAX_FILE_BYTES)
    except FileNotFoundError:
        raise KeyFileError(
            f"{path} does not exist: make keys with `impala-llm keys`, or copy the file from where they were made"
        ) from None
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}; check its owner and mode") from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise KeyFileError(f"{path} is malformed: a JSON object is expected; copy it again or make new keys") from None


def _key(path: Path, content: object, name: str) -> bytes:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise KeyFileError(f'{path} is malformed: a JSON object with "format": "{_FORMAT}" is expected; copy it again')
    value = content.get(name)
    try:
        if not isinstance(value, str) or len(value) != _KEY_CHARACTERS or len(z85.decode(value)) != 32:
            raise ValueError
        return value.encode("ascii")
    except (ValueError, KeyError, struct.error):
        # The last two come from z85. The contents of a secret file are never shown.
        raise KeyFileError(
            f"{path} is malformed: {name} must be a string of {_KEY_CHARACTERS} characters of Z85; copy the file again"
        ) from None
