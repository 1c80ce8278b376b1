"""Adapters of other libraries' environments, each with its real library: episodes, scores, what is refused."""

import asyncio
import inspect
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer

from impala_llm import frozen_policy
from impala_llm.config import load
from impala_llm.engines.base import ModelRefused
from impala_llm.envs import contract, make_suite
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.envs.textarena import RandomPlayer
from impala_llm.frozen_policy import FrozenPolicy
from impala_llm.rollout import ChatFormat

Player = Callable[[str], str]
OPENENV_PYTHON = os.environ.get("IMPALA_LLM_OPENENV_PYTHON", sys.executable)
"""A Python that has OpenEnv's server, which wants other versions of some libraries than the tests have."""


def suite(*words: str) -> Any:
    return make_suite(load(["model=scratch", *words]).env)


async def episode(suite: Any, task: int, player: Player) -> tuple[list[str], dict[str, Any], list[float]]:
    """Observations, the last info, rewards."""
    session = suite.session(training=True)
    try:
        shown, rewards, info = [await contract.reset(session, task, suite.name)], [], dict[str, Any]()
        ended = False
        while not ended:
            observation, reward, terminated, truncated, info = await contract.step(
                session, player(shown[-1]), suite.name
            )
            shown.append(observation)
            rewards.append(reward)
            ended = terminated or truncated
        return shown, info, rewards
    finally:
        contract.close(session)


def play(suite: Any, task: int, player: Player) -> tuple[list[str], dict[str, Any], list[float]]:
    return asyncio.run(episode(suite, task, player))


def score_of_script(suite: Any, task: int, noise: float) -> float:
    """Score of the suite's script, which has the session's `info` as well."""

    async def score() -> float:
        session, script = suite.session(training=True), suite.script(noise, seed=0)
        observation, info = await session.reset(task)
        ended = False
        while not ended:
            found = session.step(script.act(observation, info))
            observation, _, terminated, truncated, info = await found if inspect.isawaitable(found) else found
            ended = terminated or truncated
        session.close()
        return float(info["score"])

    return asyncio.run(score())


def told(moves: list[str]) -> Player:
    return lambda _: moves.pop(0)


def check_splits(suite: Any) -> None:
    splits = [list(suite.tasks(split)) for split in ("train", "validation", "test")]
    assert all(splits) and len(set.union(*map(set, splits))) == sum(map(len, splits))


# --- Gymnasium


LAKE = ("env=gymnasium", "env.args.kwargs.is_slippery=false", "env.args.actions=[left,down,right,up]")


def test_gymnasium_shows_what_it_renders_and_plays_names_and_numbers() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    lake = suite(*LAKE)
    check_splits(lake)
    names = ["down", "Down.", "<think>left or up?</think>\n\nright", "so 2", "I go DOWN", "right"]
    shown, info, rewards = play(lake, 3, told(names))
    assert shown[0].splitlines() == ["Actions: left, down, right, up.", "[S]FFF", "FHFH", "FFFH", "HFFG"]
    assert "[G]" in shown[-1] and rewards == [0.0] * 5 + [1.0]
    stats = {"steps": 6.0, "invalid_actions": 0.0, "return": 1.0}
    assert info == {"score": 1.0, "success": True, "stats": stats}


def test_the_preset_suits_every_environment_of_gymnasium() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    assert suite("env=gymnasium", "env.args.id=Taxi-v4").actions == list("012345")


def test_a_render_mode_that_is_set_harms_nothing() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    shown = play(suite("env=gymnasium", "env.args.kwargs.render_mode=ansi", "env.args.max_steps=1"), 3, told(["1"]))
    assert shown == play(suite("env=gymnasium", "env.args.max_steps=1"), 3, told(["1"]))


def test_names_of_actions_may_have_several_words() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    lake = suite(*LAKE, "env.args.actions=[go,go down,turn right,look-up]")
    said = ["go", "I Go Down now", "turn right.", "look-up", "2", "downgo", "no-go"]
    assert [lake.action(text, None) for text in said] == [0, 1, 2, 3, 2, None, None]


def test_gymnasium_counts_what_it_cannot_read_and_cuts_long_episodes() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    shown, info, _ = play(suite(*LAKE, "env.args.max_steps=3"), 3, lambda _: "swim")
    assert shown[1] == "This is no action: one of left, down, right, up is expected."
    assert info == {
        "score": 0.0, "success": False, "stats": {"steps": 3.0, "invalid_actions": 3.0, "return": 0.0}
    }  # fmt: skip


def test_gymnasium_episodes_depend_on_their_task_alone() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    lake = suite(*LAKE[:1], "env.args.kwargs.is_slippery=true")

    def alone(task: int) -> list[str]:
        return play(lake, task, lambda _: "down")[0]

    async def together() -> list[list[str]]:
        return [shown for shown, _, _ in await asyncio.gather(*(episode(lake, k, lambda _: "down") for k in range(8)))]

    assert asyncio.run(together()) == [alone(task) for task in range(8)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env.args.id=Chess-v7"], "env.args.id=Chess-v7 cannot be made"),
        (["env.args.id=CartPole-v1"], "env.args.id=CartPole-v1 has no text"),
        (["env.args.actions=[left,right]"], "has 2 names: 4 are needed"),
        (["env.args.actions=[left,down,Left,up]"], "env.args.actions has 'left' twice"),
        (["env.args.score_high=0"], "set it above score_low"),
        (["env.args.score_high=inf"], "env.args.score_low=0.0 and score_high=inf: set both to finite numbers"),
    ],
)
def test_gymnasium_environments_without_text_are_refused(words: list[str], said: str) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    with pytest.raises(EnvironmentFault, match=said):
        suite("env=gymnasium", *words)


# --- TextArena


def test_textarena_plays_the_other_seats() -> None:
    pytest.importorskip("textarena", reason="textarena is not installed")
    game = suite("env=textarena")
    check_splits(game)
    rng = random.Random(0)
    scores = []
    for task in range(30):
        mover = game.script(noise=0.0, seed=task)
        shown, info, rewards = play(game, task, lambda observation, mover=mover: mover.act(observation, {}))
        assert f"You are Player {task % 2} in Tic Tac Toe" in shown[0] and game.signature(task) == f"seat {task % 2}"
        assert info["score"] == (rewards[-1] + 1) / 2 and info["success"] == (rewards[-1] == 1)
        assert info["stats"]["lost_by_invalid_move"] == 0.0 and not any(rewards[:-1])
        scores.append(info["score"])
    assert {0.0, 1.0} <= set(scores) and 0.2 < sum(scores) / 30 < 0.8, "two random players win about alike"
    baseline = game.baselines()["random moves"]
    assert len({baseline().act("[GAME] '[0]', '[1]', '[2]', '[3]'", {}) for _ in range(30)}) == 4, (
        "each episode its own"
    )
    lost = play(game, 0, lambda _: f"pass {rng.random()}")[1]
    assert lost["score"] == 0.0 and lost["stats"]["lost_by_invalid_move"] == 1.0


def test_random_moves_are_all_that_a_message_of_several_lines_names() -> None:
    mover = RandomPlayer(seed=0)
    first = "[GAME] You see values.\nType [accept] to take one, or [continue] to skip it.\n[GAME] It is 0.5."
    assert {mover.act(text) for text in (first, *["[GAME] It is 0.7."] * 20)} == {"[accept]", "[continue]"}


@pytest.mark.parametrize("game_id", ["Countdown-v0", "Cryptarithm-v0"])
def test_an_invalid_move_scores_nothing_where_a_game_gives_its_reason_as_the_reward(game_id: str) -> None:
    pytest.importorskip("textarena", reason="textarena is not installed")
    game = suite("env=textarena", f"env.args.id={game_id}", "env.args.num_players=1")
    _, info, rewards = play(game, 0, told(["no move"] * 9))
    assert (info["score"], info["success"], set(rewards)) == (0.0, False, {0.0})


def test_textarena_takes_no_move_out_of_thoughts() -> None:
    pytest.importorskip("textarena", reason="textarena is not installed")
    game = suite("env=textarena", "env.args.seat=0")
    plain, *others = (
        play(game, 2, told([move, *["[4]"] * 9]))[0]
        for move in ("[4]", "<think>not [0]</think>\n\n[4]", "[0]?</think>[4]")
    )
    assert others == [plain, plain]


def test_textarena_games_depend_on_their_task_alone() -> None:
    pytest.importorskip("textarena", reason="textarena is not installed")
    game = suite("env=textarena", "env.args.id=GuessTheNumber-v0", "env.args.num_players=1")

    def counting() -> Player:
        return told([f"[{k}]" for k in range(1, 30)])

    async def together() -> list[Any]:
        return list(await asyncio.gather(*(episode(game, task, counting()) for task in range(6))))

    random.seed(7)
    state = random.getstate()
    alone = [play(game, task, counting()) for task in range(6)]
    assert random.getstate() == state, "the generator of everybody else is left alone"
    assert asyncio.run(together()) == alone
    assert len({str(each) for each in alone}) > 1
    assert all(0.0 <= info["score"] <= 1.0 for _, info, _ in alone)


def test_what_a_frozen_policy_is_told_ends_no_turn_of_its_conversation(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees the tokens that a policy would, of which special ones are the template's alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    chat = ChatFormat(AutoTokenizer.from_pretrained(tiny_model))
    seen: list[list[int]] = []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"][0].tolist()), with_kwargs=True)
    monkeypatch.setattr(frozen_policy, "load_whole", lambda path, key: model)

    async def moves() -> None:
        frozen = FrozenPolicy(0, f"{tiny_model}/.", max_new_tokens=4)
        for told in ("go<|im_end|><|im_start|>", "<|im_start|>on"):
            await frozen.act(told)

    asyncio.run(moves())
    first, second = [ids for ids in seen if len(ids) > 1]
    assert first == chat.first("go<|im_end|><|im_start|>") == second[: len(first)]
    said = second[len(first) : -len(chat.following("<|im_start|>on", second[-1]))] or [second[len(first)]]
    assert second[len(first) + len(said) :] in ([*chat.following("<|im_start|>on", token)] for token in (said[-1], -1))


def test_a_frozen_policy_sees_the_latest_tokens_of_a_long_game(tiny_model: Path) -> None:
    """Two games that differ long ago alone are played alike."""

    async def moves(begin: str) -> list[str]:
        frozen = FrozenPolicy(0, str(tiny_model), max_new_tokens=4, temperature=0, max_length=24)
        return [await frozen.act(told) for told in (begin, "go on and on. " * 20)]

    assert asyncio.run(moves("left"))[1] == asyncio.run(moves("up and down"))[1]
    with pytest.raises(ValueError, match="max_length=4: it must be above max_new_tokens=4"):
        FrozenPolicy(0, str(tiny_model), max_new_tokens=4, max_length=4)


def test_a_damaged_frozen_policy_is_named_by_its_setting(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "damaged")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    said = rf"env\.args\.opponent_args\.path={folder} cannot be loaded .*: copy the model again, or set env\.args\.opp"
    with pytest.raises(ModelRefused, match=said):
        FrozenPolicy(0, str(folder))


@pytest.mark.parametrize("quote", ["", "'"])
def test_a_frozen_policy_may_lie_in_the_home_folder(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, quote: str
) -> None:
    pytest.importorskip("textarena", reason="textarena is not installed")
    monkeypatch.setenv("HOME", str(tiny_model.parent))
    path = f"env.args.opponent_args.path={quote}~/{tiny_model.name}{quote}"
    assert suite("env=textarena", "env.args.opponent=policy", path).tasks("test")
    assert FrozenPolicy(0, f"~/{tiny_model.name}")


@pytest.mark.system
def test_textarena_plays_against_a_frozen_policy(tiny_model: Path) -> None:
    pytest.importorskip("textarena", reason="textarena is not installed")
    words = ("env.args.seat=0", "env.args.opponent=policy", f"env.args.opponent_args.path={tiny_model}")
    game = suite("env=textarena", *words, "env.args.opponent_args.max_new_tokens=4")
    for task in range(3):
        shown, info, _ = play(game, task, RandomPlayer(seed=1).act)
        assert info["success"], "random weights write no move"
        assert shown == play(game, task, RandomPlayer(seed=1).act)[0], "its samples have a seed"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env.args.id=Chess-v7"], "Chess-v7 not found"),
        (["env.args.seat=2"], "env.args.seat=2"),
        (["env.args.opponent=policy"], "opponent=policy cannot be called: .*'path': correct env.args.opponent_args"),
        (["env.args.opponent=policy", "env.args.opponent_args.path=none"], "opponent_args.path=none has no"),
        (["env.args.id=GuessTheNumber-v0"], "env.args.num_players=2: .*has to be 1"),
        (["env.args.num_players=3"], "TicTacToe-v0 does not begin with env.args.num_players=3"),
        (["env.args.opponent=strong"], "env.args.opponent=strong is not known.*random, policy"),
    ],
)
def test_textarena_games_that_do_not_exist_are_refused(words: list[str], said: str) -> None:
    pytest.importorskip("textarena", reason="textarena is not installed")
    with pytest.raises(EnvironmentFault, match=said):
        suite("env=textarena", *words)


# --- TextWorld


@pytest.mark.system
def test_textworld_makes_games_and_plays_them(tmp_path: Path) -> None:
    pytest.importorskip("textworld", reason="textworld is not installed")
    words = ("env=textworld", f"env.args.folder={tmp_path}", "env.args.settings.level=2", "env.args.num_train=2")
    games = suite(*words)
    check_splits(games)
    rng = random.Random(0)
    for task in (0, 1, 0):
        walk = play(games, task, lambda shown: rng.choice(shown.rpartition("Actions: ")[2].split(", ")))
        assert "coin" in walk[0][0] and abs(sum(walk[2]) - walk[1]["score"]) < 1e-6
    assert len(list(tmp_path.glob("*.z8"))) == 2, "a game is made once"
    assert [score_of_script(games, task, noise=0.0) for task in (0, 1)] == [1.0, 1.0]
    assert score_of_script(suite(*words, "env.args.max_steps=1"), 0, noise=1.0) in (0.0, 1.0), "possible actions"
    nothing = play(suite(*words, "env.args.max_steps=3", "env.args.show_actions=false"), 0, lambda _: "\n look\n")
    assert "Actions:" not in nothing[0][0] and nothing[1]["stats"]["steps"] == 3.0 and nothing[1]["score"] == 0.0
    with pytest.raises(EnvironmentFault, match="cannot make a game"):
        play(suite(*words, "env.args.settings.level=900"), 1, lambda _: "look")


# --- ScienceWorld


@pytest.mark.system
def test_scienceworld_serves_all_episodes_from_one_java() -> None:
    pytest.importorskip("scienceworld", reason="scienceworld is not installed")
    if shutil.which("java") is None:
        pytest.skip("Java is not installed")
    worlds = suite("env=scienceworld", "env.args.tasks=[find-animal,boil]", "env.args.max_steps=4")
    check_splits(worlds)
    tasks = list(worlds.tasks("train"))
    assert {worlds.signature(task) for task in tasks} == {"find-animal", "boil"}

    async def together() -> list[Any]:
        moves = ["look around", "inventory", "open door to kitchen", "wait1"]
        return list(await asyncio.gather(*(episode(worlds, task, told(list(moves))) for task in tasks[:4])))

    def content(episodes: list[Any]) -> list[Any]:
        """Without the order of the things in a room, which the simulator does not keep."""
        return [([sorted(text.split()) for text in shown], *rest) for shown, *rest in episodes]

    first, again = asyncio.run(together()), asyncio.run(together())
    assert content(first) == content(again), "episodes side by side, and later ones, do not change each other"
    assert all("find a(n) " in shown[0] and info["stats"]["steps"] == 4.0 for shown, info, _ in first)
    quick = suite("env=scienceworld", "env.args.max_steps=20")
    assert score_of_script(quick, 0, noise=0.0) == score_of_script(quick, 1, noise=0.2) == 1.0
    with pytest.raises(EnvironmentFault, match="env.args.tasks=fly is no task"):
        suite("env=scienceworld", "env.args.tasks=[fly]")


# --- verifiers


MODULE = """
import verifiers as vf
from datasets import Dataset

def rows(first, number):
    return Dataset.from_list([{"question": f"say {c}", "answer": c} for c in "abcdefgh"[first : first + number]])

async def right(completion, answer):
    said = [message.content for message in completion if message.role == "assistant"]
    return sum(each.strip() == answer for each in said) / len(said)

class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"again: {state['answer']}"}]

def load_environment(num_turns=1, **kwargs):
    shared = dict(dataset=rows(0, 4), eval_dataset=rows(4, 4), rubric=vf.Rubric(funcs=[right]), system_prompt="Obey.")
    return vf.SingleTurnEnv(**shared) if num_turns == 1 else Twice(max_turns=num_turns, **shared)
"""


@pytest.mark.system
def test_verifiers_environment_modules_as_they_are(user_folder: Path) -> None:
    pytest.importorskip("verifiers.legacy", reason="verifiers below 0.4 is not installed")
    (user_folder / "say_it.py").write_text(MODULE)
    sys.path.insert(0, str(user_folder))
    once, thrice = (suite("env=verifiers", "env.args.id=say_it", f"env.args.args.num_turns={n}") for n in (1, 3))
    check_splits(once)
    assert once.system_prompt == "Obey." and [len(once.tasks(s)) for s in ("train", "validation", "test")] == [4, 2, 2]
    shown, info, rewards = play(once, 1, lambda _: "b")
    assert (shown, rewards, info["score"], info["success"]) == (["say b", ""], [1.0], 1.0, True)
    assert play(once, 1, lambda _: "c")[1]["score"] == 0.0
    shown, info, rewards = play(thrice, 2, told(["c", "?", "c"]))
    assert (shown, rewards) == (["say c", "again: c", "again: c", ""], [0.0, 0.0, pytest.approx(2 / 3)])
    assert info["stats"]["right"] == info["score"] == pytest.approx(2 / 3) and info["stats"]["num_turns"] == 3.0

    async def together() -> list[Any]:
        return list(await asyncio.gather(*(episode(thrice, task % 8, lambda shown: shown[-1:]) for task in range(32))))

    assert [info["score"] for _, info, _ in asyncio.run(together())] == [1.0] * 32
    with pytest.raises(EnvironmentFault, match="chess_arena"):
        suite("env=verifiers", "env.args.id=chess_arena")


# --- OpenEnv


SERVER = """
import random, sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Said(Action):
    message: str

class Shown(Observation):
    text: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.letters, self.turn = "", 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.letters, self.turn = "".join(random.Random(seed).choices("abcd", k=2)), 0
        return Shown(text=f"say {self.letters[0]}", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        right = action.message.strip() == self.letters[self.turn]
        self.turn += 1
        done = self.turn == 2
        return Shown(text="" if done else f"say {self.letters[1]}", done=done, reward=0.5 * right)

    @property
    def state(self):
        return State(episode_id="x", step_count=self.turn)

app = create_fastapi_app(Echo, Said, Shown, max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def openenv(tmp_path: Path) -> Iterator[str]:
    """Address of a real OpenEnv server."""
    if subprocess.run([OPENENV_PYTHON, "-c", "import openenv.core"], capture_output=True).returncode != 0:
        pytest.skip("openenv-core is not installed: IMPALA_LLM_OPENENV_PYTHON may name a Python that has it")
    (tmp_path / "server.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    server = subprocess.Popen([OPENENV_PYTHON, "server.py", str(port)], cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 120
    while True:
        with socket.socket() as door:
            if door.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert server.poll() is None and time.monotonic() < deadline, "the server does not come up"
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


@pytest.mark.system
def test_openenv_episodes_over_its_real_server(openenv: str) -> None:
    words = ("env=openenv", f"env.args.url={openenv}", "env.args.observation_field=text")
    echo = suite(*words)
    check_splits(echo)

    async def together() -> list[Any]:
        return list(await asyncio.gather(*(episode(echo, task, lambda shown: shown[-1:]) for task in range(8))))

    for _ in range(3):  # more sessions than the server admits at once: ended ones are given back
        for task, (shown, info, rewards) in enumerate(asyncio.run(together())):
            assert shown[0] == f"say {random.Random(task).choices('abcd', k=2)[0]}" and rewards == [0.5, 0.5]
            assert info == {"score": 1.0, "success": True, "stats": {"steps": 2.0, "return": 1.0}}
    assert play(echo, 0, lambda _: "z")[1]["score"] == 0.0
    assert '"text": "say' in play(suite(*words[:2]), 0, lambda _: "z")[0][0]
    for word, said in (("action_field=word", "VALIDATION_ERROR"), ("observation_field=page", "choose one of text")):
        with pytest.raises(EnvironmentFault, match=said):
            play(suite(*words[:2], f"env.args.{word}"), 0, lambda _: "z")


def test_openenv_without_a_server_is_named() -> None:
    with pytest.raises(EnvironmentFault, match="env.args.url=http://127.0.0.1:9: no OpenEnv server answers"):
        play(suite("env=openenv", "env.args.url=http://127.0.0.1:9"), 0, lambda _: "z")


def test_openenv_with_a_server_that_does_not_answer_is_named() -> None:
    async def main() -> None:
        async def silent(request: web.Request) -> web.WebSocketResponse:
            answers = web.WebSocketResponse()
            await answers.prepare(request)
            async for _ in answers:
                pass
            return answers

        app = web.Application()
        app.router.add_get("/ws", silent)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        with pytest.raises(EnvironmentFault, match="has not answered in env.args.timeout_s=0.1"):
            args = f"env.args.url=http://127.0.0.1:{port}", "env.args.timeout_s=0.1"
            await episode(suite("env=openenv", *args), 0, told(["z"]))
        await contract.closed()
        await runner.cleanup()

    asyncio.run(main())


# --- what is missing


@pytest.mark.parametrize(
    ("env", "module", "extra"),
    [
        ("gymnasium", "gymnasium", "gymnasium"),
        ("textarena", "textarena", "textarena"),
        ("textworld", "textworld", "textworld"),
        ("scienceworld", "scienceworld", "scienceworld"),
        ("verifiers env.args.id=x", "verifiers", "verifiers"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    env: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EnvironmentFault, match=rf"{module} cannot be imported: pip install 'impala-llm\[{extra}\]'"):
        suite(*f"env={env}".split())
