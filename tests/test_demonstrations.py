"""Demonstrations: recorded, read, shown, filtered, refused."""

import builtins
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch
from transformers import AutoTokenizer

from impala_llm.cli import main
from impala_llm.config import ConfigError, load
from impala_llm.demonstrate import record
from impala_llm.demonstrations import (
    Demonstration,
    DemonstrationError,
    add_part,
    read,
    read_header,
    readable,
    write_header,
)
from impala_llm.envs.toy import CorridorSuite, ToyScript
from impala_llm.pipeline.shm.actor_claims import claimed_servers
from impala_llm.rollout import Turn
from impala_llm.sft_data import load_data
from impala_llm.trajectory import ARRAY_FIELDS, METADATA_FIELDS

SHOP = (
    "env=webshop",
    "env.webshop.num_products=40",
    "env.webshop.observation_mode=compact",
    "env.webshop.results_per_page=2",
    "env.webshop.instruction_once=true",
    "env.webshop.delta_pages=true",
    "engine.max_length=2048",
)
"""Pages that a tokenizer of characters fits into 2,048 tokens."""


def words(folder: Path, model: Path, *more: str) -> list[str]:
    return [
        "experiment=corridor",
        f"run.dir={folder / 'run'}",
        f"model.path={model}",
        f"demonstrations.dir={folder / 'demonstrations'}",
        "demonstrations.noise=0",
        "demonstrations.num_episodes=6",
        "engine.max_new_tokens=2",
        "engine.max_length=128",
        *more,
    ]


def test_a_script_without_noise_is_recorded_as_a_policy_s_episode_would_be(tmp_path: Path, tiny_model: Path) -> None:
    folder = record(load(words(tmp_path, tiny_model)))

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    suite = CorridorSuite()
    found = list(read(folder))
    assert len({d.trajectory.task_id for d in found}) == 6
    for d in found:
        row = d.trajectory
        assert row.score == 1.0 and row.success and row.rewards.sum() == 1.0 and not row.bootstrap
        assert row.task_id in suite.tasks("train")
        said = [tokenizer.decode(row.tokens[start:end], skip_special_tokens=True) for start, end in row.turns]
        assert said == suite.answers(row.task_id) == [turn.action for turn in d.text]
        assert [turn.observation for turn in d.text] == ["".join(door) for door in suite.doors(row.task_id)]
        conversation = [
            message
            for turn in d.text
            for message in (
                {"role": "user", "content": turn.observation},
                {"role": "assistant", "content": turn.action},
            )
        ]
        rendered = tokenizer.apply_chat_template(conversation, return_dict=False)
        assert row.tokens.tolist() == rendered[: row.num_tokens] and row.tokens[-1] == tokenizer.eos_token_id
        assert not row.behaviour_log_probs.any()


def test_noise_makes_mistakes_and_the_seed_makes_them_again(tmp_path: Path, tiny_model: Path) -> None:
    scores = []
    for name in ("one", "two"):
        config = load(words(tmp_path / name, tiny_model, "demonstrations.noise=1", "demonstrations.num_episodes=40"))
        scores.append([d.trajectory.score for d in read(record(config))])
    assert scores[0] == scores[1]
    assert 0.1 < np.mean(scores[0]) < 0.5  # of four words one is right


def test_the_same_command_adds_what_is_missing_and_nothing_else(tmp_path: Path, tiny_model: Path) -> None:
    folder = record(load(words(tmp_path, tiny_model)))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    record(load(words(tmp_path, tiny_model)))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    record(load(words(tmp_path, tiny_model, "demonstrations.num_episodes=9")))
    numbers = [d.trajectory.ticket_id for d in read(folder)]
    assert sorted(numbers) == list(range(9))
    assert before.items() <= {path.name: path.read_bytes() for path in folder.iterdir()}.items()


def before_each_episode(monkeypatch: pytest.MonkeyPatch, do: Callable[[int], object]) -> None:
    """Have a corridor's script begin each episode with do(its number, from 1)."""
    numbers, script = iter(range(1, 1000)), CorridorSuite.script

    def begun(self: CorridorSuite, noise: float, seed: int) -> ToyScript:
        do(next(numbers))
        return script(self, noise, seed)

    monkeypatch.setattr(CorridorSuite, "script", begun)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_recording_and_nothing_is_lost(
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    config = load(words(tmp_path, tiny_model, "demonstrations.num_episodes=40"))
    with monkeypatch.context() as patch:
        before_each_episode(patch, lambda n: n == 7 and os.kill(os.getpid(), number))
        with pytest.raises(SystemExit) as stop:
            record(config)
    assert stop.value.code == 128 + number
    assert "the same command records the rest" in capsys.readouterr().err
    num_before = len(list(read(tmp_path / "demonstrations")))
    assert 6 <= num_before < 40
    found = [d.trajectory.ticket_id for d in read(record(config))]
    assert sorted(found) == list(range(40)) and sorted(found[:num_before]) == sorted(found)[:num_before]


def test_sigterm_at_the_prompt_keeps_what_a_person_has_played(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter("abcd")

    def type_line(_prompt: str) -> str:
        if (word := next(typed)) == "d":
            os.kill(os.getpid(), signal.SIGTERM)
        return word

    monkeypatch.setattr(builtins, "input", type_line)
    with pytest.raises(SystemExit) as stop:
        record(load(words(tmp_path, tiny_model, "demonstrations.player=person")))
    assert stop.value.code == 128 + signal.SIGTERM
    assert [[turn.action for turn in d.text] for d in read(tmp_path / "demonstrations")] == [["a", "b", "c"]]


def test_one_process_at_a_time_records_into_a_folder(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(words(tmp_path, tiny_model))

    def record_too(_number: int) -> None:
        with pytest.raises(ConfigError, match=r"demonstrations is in use: another process records into it"):
            record(config)

    before_each_episode(monkeypatch, record_too)
    assert len(list(read(record(config)))) == 6


def test_catalogues_share_the_episodes_evenly(tmp_path: Path, tiny_model: Path) -> None:
    more = ["env.webshop.catalogue_seed=3", "demonstrations.num_catalogues=2", "engine.max_new_tokens=200"]
    config = load(words(tmp_path, tiny_model, *SHOP, *more))
    folder = record(config)
    found = list(read(folder))
    assert load_data(config, tiny_model, [folder]).catalogues == {
        f"{config.env.webshop.catalogue}, 40 products": {3, 4}
    }
    assert sorted(d.source for d in found) == ["webshop, catalogue 3"] * 3 + ["webshop, catalogue 4"] * 3
    assert np.mean([d.trajectory.score for d in found]) > 0.8


def test_what_does_not_fit_is_left_out_and_counted(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record(load(words(tmp_path, tiny_model, *SHOP)))
    assert list(read(folder)) == []
    assert "6 episodes did not fit" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="raise engine.max_length"):
        record(load(words(tmp_path, tiny_model, *SHOP, "engine.max_length=64")))


def test_a_policy_is_recorded_with_its_log_probabilities(tmp_path: Path, tiny_model: Path) -> None:
    found = list(read(record(load(words(tmp_path, tiny_model, "demonstrations.player=policy")))))
    assert len(found) == 6
    for d in found:
        row = d.trajectory
        assert (row.behaviour_log_probs[row.action_mask] < 0).all()
        assert row.actor_id == "policy"


def test_servers_that_another_command_uses_are_not_given_the_player(tmp_path: Path, tiny_model: Path) -> None:
    url = f"http://{uuid.uuid4().hex}:30000"
    servers = ["engine=sglang", f"engine.urls=[{url}]", "actor.num_actors=1", "engine.start_timeout_s=0.1"]
    config = load(words(tmp_path, tiny_model, "demonstrations.player=policy", *servers))
    with claimed_servers([url]), pytest.raises(ConfigError, match=f"engine.urls has {url}, which another command on"):
        record(config)


def test_a_person_plays_until_their_input_ends(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["", "a", "b", "c", "d"])  # one whole episode of three turns, and the first turn of another

    def type_line(_prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", type_line)
    assert main(["demonstrate", *words(tmp_path, tiny_model, "demonstrations.player=person")]) == 0
    found = list(read(tmp_path / "demonstrations"))
    assert [[turn.action for turn in d.text] for d in found] == [["a", "b", "c"]]
    printed = capsys.readouterr().out
    assert all(turn.observation in printed for turn in found[0].text)


def test_a_person_is_asked_again_for_what_cannot_be_an_answer(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No UTF-8, with a strict reader or another one, and too long an answer: none costs the episode."""
    given = b"\xff\nabcd\na\nb\n\xc3\nc\nd\n"
    for errors in ("strict", "surrogateescape"):
        read_end, write_end = os.pipe()
        os.write(write_end, given)
        os.close(write_end)
        folder = tmp_path / errors
        with open(read_end, encoding="utf-8", errors=errors) as stdin, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stdin)
            assert main(["demonstrate", *words(folder, tiny_model, "demonstrations.player=person")]) == 0
        found = list(read(folder / "demonstrations"))
        assert [[turn.action for turn in d.text] for d in found] == [["a", "b", "c"]]
        printed = capsys.readouterr().out
        assert printed.count("not UTF-8, type it again") == 2
        assert "4 tokens, and engine.max_new_tokens=2 is the most: type a shorter answer" in printed


def test_what_a_person_has_played_is_written_at_each_end(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill -9 later loses none of it."""
    typed, there = iter("abcdefg"), []

    def type_line(_prompt: str) -> str:
        there.append(len(list(read(tmp_path / "demonstrations"))))
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", type_line)
    record(load(words(tmp_path, tiny_model, "demonstrations.player=person")))
    assert there == [0, 0, 0, 1, 1, 1, 2, 2]


def test_an_empty_recording_is_told_by_its_own_key(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(os.devnull) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        given = words(tmp_path, tiny_model, "demonstrations.player=person", f"sft.dir={tmp_path / 'sft'}")
        assert main(["sft", *given]) == 2
    said = capsys.readouterr().err
    assert f"demonstrations.dir={tmp_path / 'demonstrations'}: there are no demonstrations: none was recorded" in said
    assert f"sft.data=[{tmp_path}" not in said


def test_damaged_arrays_are_told_before_anything_is_played(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = record(load(words(tmp_path, tiny_model)))
    (folder / "part-00000.safetensors").write_bytes(b"damaged")
    played: list[int] = []
    before_each_episode(monkeypatch, played.append)
    with pytest.raises(DemonstrationError, match="missing or damaged"):
        record(load(words(tmp_path, tiny_model, "demonstrations.num_episodes=9")))
    assert not played


def test_demonstrations_without_an_array_are_told_to_be_of_another_release(tmp_path: Path, tiny_model: Path) -> None:
    folder = record(load(words(tmp_path, tiny_model)))
    path = folder / "part-00000.safetensors"
    arrays = load_file(path)
    del arrays["rewards"]
    save_file(arrays, path)
    with pytest.raises(DemonstrationError, match="lacks rewards: another release has written it; record"):
        list(read(folder))


def test_another_seed_does_not_make_a_folder_grow(tmp_path: Path, tiny_model: Path) -> None:
    folder = record(load(words(tmp_path, tiny_model)))
    fix = rf"run.seed=0, and not 1: .*demonstrations.dir=NEW, and sft.data=\[{folder},NEW\] learns from both"
    with pytest.raises(ConfigError, match=fix):
        record(load(words(tmp_path, tiny_model, "run.seed=1")))
    assert len(list(read(folder))) == 6


def test_an_agent_is_refused_and_not_passed_over(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demonstrate", *words(tmp_path / "none", tiny_model), "agent.command=cat"]) == 2
    assert "agent.command=cat: no agent plays demonstrations" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_an_environment_without_a_script_is_refused(
    user_folder: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (user_folder / "unscripted.py").write_text(
        "from impala_llm.envs.toy import ParrotSuite\n"
        "class Suite:\n"
        "    def __init__(self):\n"
        "        self.other = ParrotSuite()\n"
        "        self.name, self.system_prompt = 'unscripted', ''\n"
        "        self.tasks, self.session = self.other.tasks, self.other.session\n"
        "        self.signature = self.other.signature\n"
    )
    given = words(user_folder, tiny_model, "env.name=unscripted:Suite")
    assert main(["demonstrate", *given]) == 2
    assert "demonstrations.player=script" in capsys.readouterr().err
    assert not (user_folder / "demonstrations").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("demonstrations.noise=0.5", "demonstrations.noise=0.0, and not 0.5"),
        ("env=parrot", "env.name=corridor, and not parrot"),
        ("model.path=scratch", "the tokenizer of model.path="),
    ],
)
def test_a_folder_of_other_settings_is_refused(tmp_path: Path, tiny_model: Path, change: str, named: str) -> None:
    record(load(words(tmp_path, tiny_model)))
    with pytest.raises(ConfigError, match=named):
        record(load([*words(tmp_path, tiny_model), change]))


@pytest.mark.parametrize("held", ["checkpoints/update-000001/manifest.json", "tensorboard/metrics.jsonl"])
def test_nothing_is_recorded_into_the_folder_of_a_run(tmp_path: Path, tiny_model: Path, held: str) -> None:
    folder = tmp_path / "a run"
    (folder / held).parent.mkdir(parents=True)
    (folder / held).write_text("{}")
    with pytest.raises(ConfigError, match="holds a run, a warm start or a policy: name another folder"):
        record(load([*words(tmp_path, tiny_model), f"demonstrations.dir={folder}"]))
    assert not list(folder.glob("*.json*"))


def test_settings_that_are_left_out_make_a_folder_another_one(user_folder: Path, tiny_model: Path) -> None:
    (user_folder / "mapped.py").write_text(
        "from impala_llm.envs.toy import ParrotSuite\n"
        "class Suite(ParrotSuite):\n"
        "    Options = None\n"
        "    def __init__(self, config: dict = {}):\n"
        "        super().__init__()\n"
    )
    given = words(user_folder, tiny_model, "env=mapped:Suite")
    record(load([*given, "env.args.config={least: 2, 7: [1]}"]))
    record(load([*given, "env.args.config={least: 2, 7: [1]}", "demonstrations.num_episodes=7"]))
    for change in (["env.args.config.least=2"], []):
        with pytest.raises(ConfigError, match=r"env.args.config=\{'least': 2, '7': \[1\]\}, and not \{"):
            record(load([*given, *change]))


def test_the_documented_format_holds(tmp_path: Path, tiny_model: Path) -> None:
    folder = record(load(words(tmp_path, tiny_model)))
    arrays = load_file(folder / "part-00000.safetensors")
    with safe_open(folder / "part-00000.safetensors", "np") as file:
        checksum = hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()
        assert file.metadata()["arrays_sha256"] == checksum
    lines = [json.loads(line) for line in (folder / "part-00000.jsonl").read_text().splitlines()]
    assert {n: array.dtype for n, array in arrays.items()} == {n: dtype.base for n, dtype in ARRAY_FIELDS.items()}
    assert len(arrays["tokens"]) == sum(line["num_tokens"] for line in lines)
    assert len(arrays["turns"]) == sum(line["num_turns"] for line in lines)
    assert all(set(line) == {*METADATA_FIELDS, "num_tokens", "num_turns", "source", "text"} for line in lines)
    second = slice(lines[0]["num_tokens"], lines[0]["num_tokens"] + lines[1]["num_tokens"])
    assert arrays["tokens"][second].tolist() == list(read(folder))[1].trajectory.tokens.tolist()
    page = (Path(__file__).parents[1] / "docs" / "demonstrations.md").read_text()
    header = json.loads((folder / "demonstrations.json").read_text())
    assert all(f"`{key}`" in page for key in (*arrays, *lines[0], *header))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """30 demonstrations with mistakes. Read only."""
    more = ["demonstrations.noise=0.5", "demonstrations.num_episodes=30"]
    return record(load(words(tmp_path_factory.mktemp("recorded"), tiny_model, *more)))


@pytest.fixture
def noisy(tmp_path: Path, recorded: Path) -> Path:
    """Such demonstrations that the test may damage."""
    return shutil.copytree(recorded, tmp_path / "demonstrations")


def test_they_are_shown_and_filtered_by_score(noisy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [d for d in read(noisy) if d.trajectory.score == 1.0]
    assert 0 < len(good) < 30
    assert main(["demonstrations", str(noisy), "--min-score", "1", "--read", "1", "--out", str(tmp_path / "good")]) == 0
    printed = capsys.readouterr().out
    assert f"{len(good)} demonstrations" in printed and "score 1.000, success 1.000" in printed
    assert f"scores from 0.9 to 1.0: {len(good)}\n" in printed
    assert good[0].text[0].observation in printed and f"> {good[0].text[0].action}" in printed
    kept = list(read(tmp_path / "good"))
    assert [d.trajectory.episode_id for d in kept] == [d.trajectory.episode_id for d in good]
    assert all((a.trajectory.block == b.trajectory.block).all() for a, b in zip(kept, good, strict=True))


def test_a_reader_that_has_read_enough_ends_it_quietly(
    noisy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["demonstrations", str(noisy), "--read", "30"]) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


def test_an_empty_answer_is_named(recorded: Path) -> None:
    found = next(iter(read(recorded)))
    empty = dataclasses.replace(found, text=(Turn("say a", "", 0.0), Turn("say b", "b", 1.0)))
    assert readable(empty).splitlines()[1:] == ["say a", "> (empty)", "say b", "> b"]


def test_parts_that_are_filtered_have_as_many_episodes_as_documented(noisy: Path, tmp_path: Path) -> None:
    found = list(read(noisy)) * 17
    many = copied(noisy, tmp_path / "many", *found)
    assert main(["demonstrations", str(many), "--out", str(tmp_path / "out")]) == 0
    assert [part.read_text().count("\n") for part in sorted((tmp_path / "out").glob("*.jsonl"))] == [500, 10]


def test_what_cannot_be_read_is_refused_in_a_sentence(
    noisy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*arguments: object) -> str:
        assert main(["demonstrations", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "holds no demonstrations" in refusal(tmp_path / "nowhere")
    assert "widen --min-score" in refusal(noisy, "--min-score", "1", "--max-score", "0")
    write_header(tmp_path / "begun", read_header(noisy))
    assert f"{tmp_path / 'begun'} has no recorded episode: record some" in refusal(tmp_path / "begun")
    assert "give numbers" in refusal(noisy, "--min-score", "nan")
    assert f"name the folder of demonstrations, such as {noisy}" in refusal(noisy / "part-00000.jsonl")
    assert "--read -1: " in refusal(noisy, "--read", "-1")
    (tmp_path / "there").mkdir()
    assert "exists: name a new folder" in refusal(noisy, "--out", tmp_path / "there")
    lines = noisy / "part-00000.jsonl"
    whole = lines.read_text()
    lines.write_text(whole.replace('"score": ', '"score": 7', 1))
    assert "part-00000.jsonl, line 1, is no demonstration (score is 7" in refusal(noisy)
    lines.write_text(whole)
    (noisy / "part-00000.safetensors").write_bytes(b"damaged")
    assert "part-00000.safetensors is missing or damaged" in refusal(noisy)
    (noisy / "demonstrations.json").write_text("{")
    assert "has parts but no readable demonstrations.json (JSONDecodeError" in refusal(noisy)


def test_a_folder_whose_header_is_lost_or_damaged_is_not_told_to_record_into_it(
    noisy: Path, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = noisy / "demonstrations.json"
    values = json.loads(header.read_text())
    header.unlink()
    fix = "copy it again, or record into demonstrations.dir=NEW"
    for command in (["demonstrations", str(noisy)], ["demonstrate", *words(tmp_path, tiny_model)]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"{noisy} has parts but no readable demonstrations.json (it is missing): {fix}" in said
    for key in ("player", "tokenizer", "format"):
        header.write_text(json.dumps({name: value for name, value in values.items() if name != key}))
        assert f"no readable demonstrations.json (it has no {key}): {fix}" in refused(noisy)
    header.write_text(json.dumps({"format": 2}))
    (begun := tmp_path / "begun").mkdir()
    shutil.copy(header, begun)
    assert "demonstrations.json cannot be read (it has no env): record the demonstrations again" in refused(begun)


def copied(folder: Path, target: Path, *found: Demonstration) -> Path:
    """A folder with the header of another one, and these as its only part."""
    target.mkdir()
    (target / "demonstrations.json").write_bytes((folder / "demonstrations.json").read_bytes())
    add_part(target, found)
    return target


def test_whatever_an_environment_says_is_read_back(noisy: Path, tmp_path: Path) -> None:
    first = next(iter(read(noisy)))
    odd = "line\u2028paragraph\u2029next\u0085half \ud83d of a pair, é, \r\n, \x1c"
    text = (Turn(odd, odd, 1.0),)
    changed = dataclasses.replace(first, source=odd, text=text)
    folder = copied(noisy, tmp_path / "odd", changed, first)
    back = list(read(folder))
    assert [d.text for d in back] == [text, first.text] and back[0].source == odd
    readable(back[0]).encode()  # a terminal can show it


def test_lines_that_were_written_as_utf_8_are_read_as_well(noisy: Path) -> None:
    path = noisy / "part-00000.jsonl"
    arrays = noisy / "part-00000.safetensors"
    lines = [json.loads(line) | {"source": "é\u2028\u0085"} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
    save_torch({name: torch.from_numpy(array) for name, array in load_file(arrays).items()}, arrays)  # no checksum
    assert {d.source for d in read(noisy)} == {"é\u2028\u0085"}


def refused(folder: Path) -> str:
    with pytest.raises(DemonstrationError) as refusal:
        list(read(folder))
    return str(refusal.value)


def test_lines_are_never_paired_with_the_arrays_of_others(noisy: Path) -> None:
    path = noisy / "part-00000.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    for kept in (whole[1:], [*whole, whole[-1]]):
        path.write_text("".join(kept))
        assert f"{path}: num_tokens of its {len(kept)} lines is " in refused(noisy)
    first = json.loads(whole[0])
    same = next(n for n in range(1, 30) if json.loads(whole[n])["num_tokens"] == first["num_tokens"])
    whole[0], whole[same] = whole[same], whole[0]
    path.write_text("".join(whole))
    assert "part-00000.jsonl has other lines than part-00000.safetensors was written with" in refused(noisy)


def test_arrays_that_are_not_as_they_were_written_are_refused(noisy: Path) -> None:
    path = noisy / "part-00000.safetensors"
    written = path.read_bytes()
    offsets = [written.index(load_file(path)[name].tobytes()) for name in ARRAY_FIELDS]
    for offset in (*offsets, len(written) - 1):
        path.write_bytes(written[:offset] + bytes([written[offset] ^ 1]) + written[offset + 1 :])
        assert f"{path} has other arrays than were written" in refused(noisy)
    path.write_bytes(written)
    whole = list(read(noisy))
    # A part of an older release has the checksum of the lines alone.
    lines_sha256 = hashlib.sha256((noisy / "part-00000.jsonl").read_bytes()).hexdigest()
    arrays = {name: torch.from_numpy(array) for name, array in load_file(path).items()}
    save_torch(arrays, path, {"lines_sha256": lines_sha256})
    assert [d.trajectory.tokens.tolist() for d in read(noisy)] == [d.trajectory.tokens.tolist() for d in whole]


def with_line(change: dict[str, object]) -> Callable[[bytes], bytes]:
    def changed(line: bytes) -> bytes:
        return json.dumps(json.loads(line) | change).encode()

    return changed


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda line: line.replace(b'"task_id"', b'"task\xff"'), "line 1, is no demonstration (UnicodeDecodeError"),
        (lambda line: b"[1]", "line 1, is no demonstration (it is no JSON object)"),
        (lambda line: b"[" * 100_000, "line 1, is no demonstration (RecursionError"),
        (with_line({"source": {}}), "line 1, is no demonstration (source is {}: text is expected)"),
        (with_line({"episode_id": 7}), "line 1, is no demonstration (episode_id is 7: text is expected)"),
        (with_line({"num_turns": -1}), "line 1, is no demonstration (num_turns is -1: a count is expected)"),
        (with_line({"text": [[1, 2, 3]]}), "line 1, is no demonstration (text has [1, 2, 3]: text, text, number"),
        (with_line({"text": 5}), "line 1, is no demonstration (TypeError"),
    ],
)
def test_a_damaged_line_is_named(noisy: Path, change: Callable[[bytes], bytes], named: str) -> None:
    path = noisy / "part-00000.jsonl"
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(change(first) + b"\n" + rest)
    assert f"{path}, {named}" in refused(noisy)


def test_other_damage_is_named(noisy: Path, tmp_path: Path, tiny_model: Path) -> None:
    arrays = load_file(noisy / "part-00000.safetensors")
    whole = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        save_torch(whole | {"rewards": whole["rewards"].to(dtype)}, noisy / "part-00000.safetensors")
        assert "part-00000" in refused(noisy)
    save_torch({"tokens": whole["tokens"]}, noisy / "part-00000.safetensors")
    assert "part-00000.safetensors lacks action_mask, behaviour_log_probs, rewards" in refused(noisy)
    (noisy / "part-00001.jsonl").mkdir()
    save_torch(whole, noisy / "part-00000.safetensors")
    assert "part-00001.jsonl cannot be read" in refused(noisy)
    with pytest.raises(DemonstrationError, match=r"part-00001.jsonl cannot be read"):
        record(load(words(tmp_path, tiny_model, "demonstrations.noise=0.5", "demonstrations.num_episodes=31")))
    (noisy / "part-x.jsonl").touch()
    assert "part-x.jsonl has no number as part-00000.jsonl has" in refused(noisy)
    for content in ("[" * 100_000, "[]", '{"format": 2, "env": 2}', "\udcff"):
        (noisy / "demonstrations.json").write_text(content, errors="surrogateescape")
        assert "has parts but no readable demonstrations.json" in refused(noisy)


def test_demonstrations_of_another_format_are_refused_with_what_to_do(tmp_path: Path, tiny_model: Path) -> None:
    folder = record(load(words(tmp_path, tiny_model)))
    header = json.loads((folder / "demonstrations.json").read_text())
    (folder / "demonstrations.json").write_text(json.dumps({**header, "format": 1}))
    said = f"another format than 2: record .* demonstrations.dir=NEW`, and name NEW in place of {folder}$"
    with pytest.raises(DemonstrationError, match=said):
        list(read(folder))
    config = load(words(tmp_path, tiny_model))
    with pytest.raises(DemonstrationError, match=said):
        record(config)
    with pytest.raises(DemonstrationError, match=said):
        load_data(config, tiny_model, [folder])
    new = record(load(words(tmp_path, tiny_model, f"demonstrations.dir={tmp_path / 'NEW'}")))
    assert load_data(config, tiny_model, [new]).learned
