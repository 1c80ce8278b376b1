"""Tokens in, tokens out: what the policy said is what the trajectory holds, whatever template and tokenizer do."""

import asyncio
import math
import tracemalloc

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from impala_llm.engines.base import Generation
from impala_llm.learning.policy.scratch import make_scratch_policy
from impala_llm.rollout import ChatFormat, EpisodeAborted, EpisodeLimits, EpisodeSpec, Turn, play_episode


class Echo:
    """Environment of a given number of turns: shows the number of the turn and the last action."""

    def __init__(self, num_turns: int, truncates: bool = False) -> None:
        self.num_turns, self.truncates, self.actions = num_turns, truncates, []

    def reset(self, task_id):
        return f"task {task_id}", {}

    def step(self, action):
        self.actions.append(action)
        done = len(self.actions) == self.num_turns
        info = {"score": 0.5, "success": False, "stats": {"length": len(action)}} if done else {}
        return f"turn {len(self.actions)}", float(done), done and not self.truncates, done and self.truncates, info


class Scripted:
    """Engine that says given completions and remembers what it was asked: token i has log-probability -i, version i."""

    version, vocab_size = 0, 100

    def __init__(self, completions, finish="stop") -> None:
        self.completions, self.finish = list(completions), finish
        self.prompts, self.params, self.released, self.said = [], [], [], 0

    async def generate(self, session_id, prompt, params):
        self.prompts.append(list(prompt))
        self.params.append(params)
        tokens = np.array(self.completions.pop(0), np.int32)
        numbers = np.arange(self.said, self.said + len(tokens))
        self.said += len(tokens)
        return Generation(tokens, -numbers.astype(np.float32), numbers.astype(np.int32), self.finish)

    def release(self, session_id):
        self.released.append(session_id)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_scratch_policy(tmp_path_factory.mktemp("scratch") / "policy"))


SPEC = EpisodeSpec("e", task_id=7, group_id=1, ticket_id=2, seed=3, env="echo", actor_id="a", signature="s")


def play(tokenizer, completions, session, max_length=200, max_new_tokens=10, finish="stop", transcript=None):
    engine = Scripted(completions, finish)
    chat = ChatFormat(tokenizer)
    limits = EpisodeLimits(0.7, max_new_tokens, max_length)
    trajectory = asyncio.run(play_episode(SPEC, session, engine, chat, limits, transcript))
    return trajectory, engine


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def test_episode_is_one_row_of_what_was_seen_and_said(scratch):
    end, act = scratch.eos_token_id, scratch.convert_tokens_to_ids("<|act|>")
    completions = [[*ids(scratch, "go"), end], [*ids(scratch, "on"), end]]
    session = Echo(2)
    transcript: list[Turn] = []
    trajectory, engine = play(scratch, completions, session, transcript=transcript)
    expected = [*ids(scratch, "task 7"), act, *completions[0], *ids(scratch, "turn 1"), act, *completions[1]]
    assert trajectory.tokens.tolist() == expected
    assert session.actions == ["go", "on"]
    assert trajectory.turns.tolist() == [[7, 10], [17, 20]]
    mask = trajectory.action_mask
    assert trajectory.tokens[mask].tolist() == completions[0] + completions[1]
    assert trajectory.behaviour_log_probs[mask].tolist() == [0, -1, -2, -3, -4, -5]
    assert trajectory.versions[mask].tolist() == [0, 1, 2, 3, 4, 5]
    assert trajectory.rewards[trajectory.rewards != 0].tolist() == [1.0] and trajectory.rewards[19] == 1.0
    assert (trajectory.bootstrap, trajectory.score, trajectory.stats) == (False, 0.5, {"length": 2.0})
    assert [(turn.observation, turn.action) for turn in transcript] == [("task 7", "go"), ("turn 1", "on")]
    assert engine.released == ["e"]


def test_engine_gets_the_whole_history_and_never_a_rewritten_one(scratch):
    end = scratch.eos_token_id
    _, engine = play(scratch, [[*ids(scratch, "a"), end], [*ids(scratch, "b"), end], [end]], Echo(3))
    for shorter, longer in zip(engine.prompts, engine.prompts[1:], strict=False):
        assert longer[: len(shorter)] == shorter
    assert all(p.seed == 3 and p.temperature == 0.7 and p.stop_token_ids == (end,) for p in engine.params)


def test_tokens_that_no_encoder_would_choose_survive(tiny_model):
    """Ids that decode to a text which encodes to other ids are kept as they are."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    odd = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "x", "<|endoftext|>"])
    trajectory, _ = play(tokenizer, [[*odd, tokenizer.eos_token_id]], Echo(1))
    assert trajectory.tokens[trajectory.action_mask].tolist() == [*odd, tokenizer.eos_token_id]


def test_chatml_conversation_equals_the_template(tiny_model):
    """With a ChatML template the row is what the template renders for the same conversation."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    end = tokenizer.eos_token_id
    trajectory, _ = play(tokenizer, [[*ids(tokenizer, "go"), end], [*ids(tokenizer, "on"), end]], Echo(2))
    messages = [
        {"role": "user", "content": "task 7"},
        {"role": "assistant", "content": "go"},
        {"role": "user", "content": "turn 1"},
        {"role": "assistant", "content": "on"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(trajectory.tokens.tolist()) == rendered.rstrip("\n")


def test_completion_cut_by_length_gets_its_end_from_the_template(scratch):
    end = scratch.eos_token_id
    trajectory, _ = play(scratch, [ids(scratch, "ab"), [end]], Echo(2), finish="length")
    after = trajectory.turns[0, 1]
    assert trajectory.tokens[after] == end and not trajectory.action_mask[after]


def test_special_token_in_an_observation_is_only_text(scratch):
    chat = ChatFormat(scratch)
    assert scratch.eos_token_id not in chat.first("a<|end|>b")
    assert scratch.decode(chat.first("a<|end|>b")[:-1]) == "a<|end|>b"


def test_a_text_that_spells_an_added_token_of_the_template_is_one_in_a_completion_alone(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens(["<think>", "</think>", "<table>"])
    thought, table = tokenizer.convert_tokens_to_ids(["</think>", "<table>"])
    tokenizer.chat_template += "{% if add_generation_prompt %}<think></think>{% endif %}"
    chat, said = ChatFormat(tokenizer), "a </think><table>"
    for ids in (chat.first(said), chat.following(said, tokenizer.eos_token_id)):
        assert ids.count(thought) == 1, "of the template"
        assert ids.count(table) == 1, "a token of texts"
        assert said in tokenizer.decode(ids)
    assert chat.completion(said).count(thought) == 1


@pytest.mark.parametrize("said", [{"score": 30.0}, {"score": None, "stats": {"room": "kitchen"}}, {"success": True}])
def test_a_full_context_has_no_score_whatever_info_held_on_the_way(scratch, said):
    class Telling(Echo):
        def step(self, action):
            observation, reward, terminated, truncated, _ = super().step(action)
            return observation, reward, terminated, truncated, said

    end = scratch.eos_token_id
    trajectory, _ = play(scratch, [[*ids(scratch, "a"), end], [*ids(scratch, "b"), end]], Telling(9), max_length=16)
    assert (trajectory.score, trajectory.success, trajectory.stats) == (0.0, False, {})


def test_full_context_is_an_end(scratch):
    end = scratch.eos_token_id
    trajectory, engine = play(scratch, [[*ids(scratch, "a"), end], [*ids(scratch, "b"), end]], Echo(9), max_length=16)
    assert len(engine.prompts) == 1 and engine.params[0].max_new_tokens == 9
    assert not trajectory.bootstrap and trajectory.num_tokens == 9


def test_an_outside_limit_bootstraps_from_what_is_seen_last_and_a_terminal_state_does_not(scratch):
    end, act = scratch.eos_token_id, scratch.convert_tokens_to_ids("<|act|>")
    cut, _ = play(scratch, [[end]], Echo(1, truncates=True))
    ended, _ = play(scratch, [[end]], Echo(1))
    assert not ended.bootstrap and ended.num_tokens == ended.turns[0, 1]
    assert cut.bootstrap and cut.tokens.tolist() == [*ended.tokens.tolist(), *ids(scratch, "turn 1"), act]
    assert not cut.action_mask[ended.num_tokens :].any() and cut.rewards.sum() == ended.rewards.sum() == 1.0


def test_aborted_completion_ends_the_episode_and_frees_its_session(scratch):
    engine = Scripted([[scratch.eos_token_id]], finish="abort")
    with pytest.raises(EpisodeAborted, match="turn 0"):
        asyncio.run(play_episode(SPEC, Echo(1), engine, ChatFormat(scratch), EpisodeLimits(1.0, 4, 50)))
    assert engine.released == ["e"]


def test_what_came_before_an_aborted_completion_can_be_kept(scratch):
    class AbortsSecond(Scripted):
        async def generate(self, session_id, prompt, params):
            self.finish = "abort" if self.prompts else "stop"
            return await super().generate(session_id, prompt, params)

    end = scratch.eos_token_id
    engine, session = AbortsSecond([[5, end], [6, 7, 8]]), Echo(3)
    trajectory = asyncio.run(
        play_episode(SPEC, session, engine, ChatFormat(scratch), EpisodeLimits(1.0, 4, 200, ends_at=math.inf))
    )
    assert trajectory.bootstrap and len(trajectory.turns) == 1
    assert trajectory.tokens.tolist() == engine.prompts[1], "up to where the second turn began"
    assert trajectory.behaviour_log_probs[trajectory.action_mask].tolist() == [0, -1]
    assert trajectory.versions[trajectory.action_mask].tolist() == [0, 1]
    assert len(session.actions) == 1, "half a completion is no action"
    assert trajectory.score == 0.0
    assert engine.released == ["e"]


@pytest.mark.parametrize("completion", [[], [6, 7]])
def test_nothing_is_kept_of_a_completion_aborted_in_the_first_turn(scratch, completion):
    engine = Scripted([completion], finish="abort")
    with pytest.raises(EpisodeAborted):
        asyncio.run(
            play_episode(SPEC, Echo(1), engine, ChatFormat(scratch), EpisodeLimits(1.0, 4, 50, ends_at=math.inf))
        )


def test_no_turn_begins_when_the_time_of_an_episode_is_over_and_those_before_are_kept(scratch):
    completions = [[token, scratch.eos_token_id] for token in (5, 6, 7)]
    _, asked = play(scratch, completions, Echo(3))
    limits, unrolls = EpisodeLimits(1.0, 4, 200, unroll_turns=1, ends_at=0.0), []  # it was over before the first one

    def cut(session):
        engine, chat = Scripted(completions), ChatFormat(scratch)
        return asyncio.run(play_episode(SPEC, session, engine, chat, limits, on_unroll=unrolls.append))

    trajectory = cut(Echo(3))
    assert trajectory.tokens.tolist() == asked.prompts[1], "up to where the second turn would begin"
    assert trajectory.bootstrap and not trajectory.continues and len(trajectory.turns) == 1
    assert trajectory.score == 0.0 and unrolls == []
    ended = cut(Echo(1))
    assert not ended.bootstrap and ended.score == 0.5, "a step that ends the episode is its end"


def test_first_observation_without_room_is_refused(scratch):
    with pytest.raises(ValueError, match="[0-9] tokens .* at engine.max_length=5: raise engine.max_length"):
        play(scratch, [], Echo(1), max_length=5)


def test_tokenizer_without_template_is_refused(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat_template"):
        ChatFormat(tokenizer)


# --- what ends a completion


LLAMA = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ '<s>[INST] ' + message.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + ' </s>' }}{% endif %}{% endfor %}"
)
ENDED = (
    "{% for message in messages %}{{ '[' + message.content + ('<|end|>' if message.role == 'assistant' else '') }}"
    "{% endfor %}"
)
PLAIN = "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"


def make_byte_tokenizer(template):
    """One token a byte, and <s> and </s>."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template
    )  # fmt: skip


def test_a_completion_ends_with_a_special_token_and_not_with_the_space_before_it():
    tokenizer = make_byte_tokenizer(LLAMA)
    chat, end = ChatFormat(tokenizer), tokenizer.eos_token_id
    assert chat.stop_token_ids == (end,)
    assert tokenizer.decode(chat.completion("a b")) == "a b </s>", "as the template has it"
    assert chat.text(np.array(chat.completion("a b"))) == chat.text(np.array([*ids(tokenizer, "a b"), end])) == "a b"
    assert tokenizer.decode(chat.following("c", end)) == "<s>[INST] c [/INST]"
    assert tokenizer.decode(chat.following("c", ids(tokenizer, "b")[0])) == " </s><s>[INST] c [/INST]", "cut by length"


def test_an_added_token_that_ends_a_completion_is_no_part_of_a_text():
    tokenizer = make_byte_tokenizer(ENDED)
    tokenizer.add_tokens(["<|end|>"])
    ids_before, vocabulary = ids(tokenizer, "[go<|end|>"), tokenizer.get_vocab()
    chat, end = ChatFormat(tokenizer), tokenizer.convert_tokens_to_ids("<|end|>")
    assert chat.text(np.array([*ids(tokenizer, "go"), end])) == "go"
    assert end not in chat.first("a<|end|>b") and tokenizer.decode(chat.first("a<|end|>b")) == "[a<|end|>b"
    assert chat.completion("a<|end|>b").count(end) == 1
    assert ids(tokenizer, "[go<|end|>") == ids_before and tokenizer.get_vocab() == vocabulary, "as the template has it"


def test_a_template_that_ends_a_completion_with_mere_text_is_refused():
    with pytest.raises(ValueError, match=r"the chat template writes .*user: .* behind a completion: .*'</s>'"):
        ChatFormat(make_byte_tokenizer(PLAIN))


# --- unrolls


def play_unrolls(tokenizer, completions, session, max_length=200, **limits):
    """The unrolls of an episode and the whole of it."""
    unrolls = []
    chat = ChatFormat(tokenizer)
    rules = EpisodeLimits(0.7, 10, max_length, **limits)
    last = asyncio.run(play_episode(SPEC, session, Scripted(completions), chat, rules, on_unroll=unrolls.append))
    return [*unrolls, last]


def make_completions(tokenizer, sizes):
    """Completions of so many tokens, each with an end."""
    return [[*ids(tokenizer, "abcdefgh"[: size - 1]), tokenizer.eos_token_id] for size in sizes]


@pytest.mark.parametrize(
    ("limits", "num_turns"),
    [
        ({"unroll_turns": 1}, [1, 1, 1, 1, 1]),
        ({"unroll_turns": 2}, [2, 2, 1]),
        ({"unroll_turns": 5}, [5]),
        ({"unroll_tokens": 4}, [2, 1, 1, 1]),  # completions of 3, 2, 4, 5 and 1 tokens
        ({"unroll_tokens": 1}, [1, 1, 1, 1, 1]),
        ({"unroll_tokens": 6, "unroll_turns": 3}, [3, 2]),
        ({}, [5]),
    ],
)
def test_unrolls_are_the_pieces_of_the_episode(scratch, limits, num_turns):
    sizes = [3, 2, 4, 5, 1]
    [whole] = play_unrolls(scratch, make_completions(scratch, sizes), Echo(5))
    unrolls = play_unrolls(scratch, make_completions(scratch, sizes), Echo(5), **limits)
    assert [len(t.turns) for t in unrolls] == num_turns
    assert [t.unroll_index for t in unrolls] == list(range(len(unrolls)))
    assert np.concatenate([t.turns for t in unrolls]).tolist() == whole.turns.tolist()
    for name in ("tokens", "behaviour_log_probs", "versions", "rewards"):
        own = np.concatenate([getattr(t, name)[t.action_mask] for t in unrolls])
        assert own.tolist() == getattr(whole, name)[whole.action_mask].tolist()
    for t in unrolls:
        assert t.tokens.tolist() == whole.tokens[: t.num_tokens].tolist(), "with all that was before"
    for t, following in zip(unrolls, unrolls[1:], strict=False):
        # The state to bootstrap from is the one in which the next turn was decided.
        assert t.num_tokens == following.turns[0, 0] and t.bootstrap and t.continues
        assert (t.score, t.success, t.stats) == (0.0, False, {})
    last = unrolls[-1]
    assert not (last.bootstrap or last.continues) and last.num_tokens == whole.num_tokens
    assert (last.score, last.stats) == (whole.score, whole.stats)
    assert len({t.episode_id for t in unrolls}) == 1


def test_an_episode_that_is_cut_has_no_unroll_to_follow(scratch):
    """The context is full after the second turn: that is the last unroll, however its turns count, and an end."""
    completions = [[*ids(scratch, "a"), scratch.eos_token_id]] * 2
    unrolls = play_unrolls(scratch, completions, Echo(9), max_length=24, unroll_turns=1)
    assert [(t.continues, t.bootstrap) for t in unrolls] == [(True, True), (False, False)]


def test_without_somebody_to_hand_unrolls_to_an_episode_stays_whole(scratch):
    limits = EpisodeLimits(0.7, 10, 200, unroll_turns=1)
    engine = Scripted(make_completions(scratch, [2, 2]))
    trajectory = asyncio.run(play_episode(SPEC, Echo(2), engine, ChatFormat(scratch), limits))
    assert len(trajectory.turns) == 2 and not trajectory.continues


@pytest.mark.system
def test_long_observations_take_no_more_memory_the_more_there_were(scratch):
    chat = ChatFormat(scratch)
    letters = "abcd" * 1000
    assert len(chat.first(letters)) > len(letters)
    tracemalloc.start()
    try:
        for number in range(400):
            chat.first(f"{number} {letters}")
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 1.6 million tokens as tuples are 13 MB, in which those of small numbers share their objects, and texts 2 MB.
    assert kept < 11 * 2**20
