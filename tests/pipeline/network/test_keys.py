"""Key files: never readable by others, never overwritten, never half understood."""

import json
import os
import stat
from pathlib import Path

import pytest
import zmq

from impala_llm.pipeline.network import keys
from impala_llm.pipeline.network.keys import AuthorisedKeys, KeyFileError, load_actor_keys, load_learner_keys, make_keys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["a", "b"])
    return tmp_path / "keys"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_learner_and_actors_know_each_other(folder: Path) -> None:
    learner, actor = load_learner_keys(folder), load_actor_keys(folder, "a")
    assert actor.learner == learner.public
    assert zmq.curve_public(actor.secret) == actor.public and zmq.curve_public(learner.secret) == learner.public
    authorised = AuthorisedKeys(learner.authorised)
    assert authorised.name(actor.public) == "a"
    assert authorised.name(load_actor_keys(folder, "b").public) == "b"
    assert authorised.name(learner.public) is None
    assert len({learner.secret, actor.secret, load_actor_keys(folder, "b").secret}) == 3


def test_secrets_are_for_this_user_only(folder: Path) -> None:
    assert mode(folder) == mode(folder / "authorised") == 0o700
    for name in ("learner", "a", "b"):
        assert mode(folder / f"{name}.secret.json") == 0o600
    public = [folder / "learner.public.json", *(folder / "authorised").iterdir()]
    assert len(public) == 3 and not any("secret" in path.read_text() for path in public)


def test_secrets_do_not_show(folder: Path) -> None:
    for loaded in (load_learner_keys(folder), load_actor_keys(folder, "a")):
        assert loaded.secret.decode() not in repr(loaded)


def test_a_permissive_umask_opens_nothing(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_keys(tmp_path / "keys")
    finally:
        os.umask(before)
    assert mode(tmp_path / "keys") == 0o700 and mode(tmp_path / "keys" / "actor.secret.json") == 0o600


def test_actors_are_added_later_and_the_learner_stays(folder: Path) -> None:
    before = load_learner_keys(folder)
    make_keys(folder, ["c"])
    assert load_learner_keys(folder) == before
    assert load_actor_keys(folder, "c").learner == before.public


def test_no_key_is_overwritten(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*.json")}
    with pytest.raises(KeyFileError, match=r"a\.secret\.json exists.*--actors.*delete"):
        make_keys(folder, ["new", "a"])
    (folder / "b.secret.json").rename(folder.parent / "moved.json")
    with pytest.raises(KeyFileError, match=r"b\.public\.json exists"):
        make_keys(folder, ["b"])
    (folder.parent / "moved.json").rename(folder / "b.secret.json")
    assert {path: path.read_bytes() for path in folder.rglob("*.json")} == before


def test_a_link_is_not_followed_when_keys_are_made(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o700)
    (tmp_path / "keys" / "actor.secret.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeyFileError, match="exists"):
        make_keys(tmp_path / "keys")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("names", [["../a"], [""], ["a/b"], ["learner"], ["a", "a"], [".a"]])
def test_names_that_cannot_be_files_are_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(ValueError, match="actor"):
        make_keys(tmp_path / "keys", names)
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("name", ["a.secret.json", "learner.secret.json"])
@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o610])
def test_a_secret_that_others_may_use_is_refused(folder: Path, name: str, bits: int) -> None:
    (folder / name).chmod(bits)
    with pytest.raises(KeyFileError, match=rf"{name} has mode 0{bits:o}.*chmod 600 {folder / name}"):
        load_learner_keys(folder) if name.startswith("learner") else load_actor_keys(folder, "a")


def test_a_folder_that_others_may_use_is_refused(folder: Path) -> None:
    folder.chmod(0o755)
    for use in (load_learner_keys, lambda path: load_actor_keys(path, "a"), lambda path: make_keys(path, ["c"])):
        with pytest.raises(KeyFileError, match=f"chmod 700 {folder}"):
            use(folder)


def test_keys_of_another_user_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.geteuid() + 1
    monkeypatch.setattr(keys.os, "geteuid", lambda: other)
    with pytest.raises(KeyFileError, match=f"belongs to user {other - 1}.*chown {other}"):
        load_actor_keys(folder, "a")


def changed(**fields: object) -> str:
    secret = "D" * 40  # the same in every process that collects the tests: the text is part of their names
    public = zmq.curve_public(secret.encode()).decode()
    content = {"format": "impala_llm CURVE key 1", "public_key": public, "secret_key": secret} | fields
    return json.dumps({name: value for name, value in content.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "JSON object"),
        ("[" * 4000, "JSON object"),
        (changed()[:-5], "JSON object"),
        ("\xff", "JSON object"),
        ("[]", '"format"'),
        (changed(format="impala_llm CURVE key 2"), '"format"'),
        (changed(secret_key=None), "secret_key must be"),
        (changed(secret_key=7), "secret_key must be"),
        (changed(secret_key="0" * 39), "40 characters of Z85"),
        (changed(secret_key='"' * 40), "40 characters of Z85"),
        (changed(secret_key="#" * 40), "40 characters of Z85"),
        (changed(secret_key="ä" * 40), "40 characters of Z85"),
        (changed(public_key=None), "public_key must be"),
        (changed(public_key="1" * 40), "does not belong"),
    ],
)
def test_a_malformed_key_names_the_file_and_what_is_expected(folder: Path, text: str, expected: str) -> None:
    path = folder / "a.secret.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(KeyFileError) as caught:
        load_actor_keys(folder, "a")
    assert str(path) in str(caught.value) and expected in str(caught.value)


def test_what_is_missing_is_named(folder: Path) -> None:
    with pytest.raises(KeyFileError, match=r"c\.secret\.json does not exist.*impala-llm keys"):
        load_actor_keys(folder, "c")
    with pytest.raises(KeyFileError, match=r"one actor, and has a\.secret\.json, b\.secret\.json"):
        load_actor_keys(folder)
    (folder / "b.secret.json").unlink()
    assert load_actor_keys(folder) == load_actor_keys(folder, "a")
    (folder / "a.secret.json").unlink()
    with pytest.raises(KeyFileError, match="and has none.*impala-llm keys"):
        load_actor_keys(folder)
    (folder / "learner.public.json").unlink()
    with pytest.raises(KeyFileError, match=r"learner\.public\.json does not exist"):
        load_learner_keys(folder)
    with pytest.raises(KeyFileError, match=r"learner\.secret\.json does not exist"):
        load_learner_keys(folder / "nowhere")


def test_a_learner_starts_with_sound_files_only(folder: Path) -> None:
    (folder / "authorised" / "c.public.json").write_text("{}")
    with pytest.raises(KeyFileError, match=r"c\.public\.json is malformed"):
        load_learner_keys(folder)
    (folder / "authorised" / "c.public.json").rename(folder / "authorised" / "c d.public.json")
    with pytest.raises(KeyFileError, match="cannot name an actor"):
        load_learner_keys(folder)


def test_the_learners_two_files_belong_together(folder: Path) -> None:
    (folder / "learner.public.json").write_bytes((folder / "authorised" / "a.public.json").read_bytes())
    with pytest.raises(KeyFileError, match="does not belong to learner.secret.json"):
        load_learner_keys(folder)


def test_the_authorised_folder_is_followed(folder: Path) -> None:
    directory = folder / "authorised"
    authorised = AuthorisedKeys(directory)
    a, b = (load_actor_keys(folder, name).public for name in "ab")
    assert authorised.name(a) == "a"
    (directory / "a.public.json").unlink()
    assert authorised.name(a) is None and authorised.name(b) == "b"
    make_keys(folder, ["c"])
    c = load_actor_keys(folder, "c").public
    assert authorised.name(c) == "c"
    # Written over in place: the folder's own time of change stays.
    time_of_change = directory.stat().st_mtime_ns
    (directory / "b.public.json").write_bytes((directory / "c.public.json").read_bytes() + b"\n")
    assert directory.stat().st_mtime_ns == time_of_change
    assert authorised.name(b) is None


def test_one_bad_file_shuts_nobody_else_out(folder: Path) -> None:
    directory = folder / "authorised"
    (directory / "a.public.json").write_text("{")
    (directory / "dangling.public.json").symlink_to("nowhere")
    (directory / "folder.public.json").mkdir()
    (directory / "notes.txt").write_text("not a key")
    authorised = AuthorisedKeys(directory)
    assert authorised.name(load_actor_keys(folder, "a").public) is None
    assert authorised.name(load_actor_keys(folder, "b").public) == "b"


def test_without_the_folder_nobody_is_authorised_until_it_is_back(folder: Path) -> None:
    directory, b = folder / "authorised", load_actor_keys(folder, "b").public
    authorised = AuthorisedKeys(directory)
    assert authorised.name(b) == "b"
    directory.rename(folder / "away")
    assert authorised.name(b) is None
    (folder / "away").rename(directory)
    assert authorised.name(b) == "b"
