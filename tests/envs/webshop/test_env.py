import json
import random

import pytest

from impala_llm.envs.webshop import RewardParts, WebShopEnv


def _replay(catalogue, trace):
    env = WebShopEnv(
        catalogue,
        goals=trace.get("goal_set", "synthetic"),
        observation_mode=trace["mode"],
        show_attributes=trace.get("show_attrs", False),
    )
    for step in trace["steps"]:
        if step["action"] is None:
            observation, info = env.reset(task_id=trace["session"])
            reward, terminated = 0.0, False
            assert {name: getattr(env.goal, name) for name in trace["goal"]} == trace["goal"]
        else:
            observation, reward, terminated, truncated, info = env.step(step["action"])
            assert not truncated
        assert observation == step["obs"]
        assert reward == pytest.approx(step["reward"], abs=1e-12)
        assert terminated == step["done"]
        assert info["available_actions"] == step["available"]


def test_golden_traces(shop, read_cases):
    traces = read_cases("cases/traces.jsonl")
    assert {trace["mode"] for trace in traces} == {"text", "text_rich"}
    for trace in traces:
        _replay(shop, trace)


def test_golden_edge_traces(edge_shop, read_cases):
    for trace in read_cases("edge/traces.jsonl"):
        _replay(edge_shop, trace)


@pytest.fixture
def play(small_shop, item):
    """Starts an episode in a shop of two products, the given record and a plain one, and plays the given actions."""

    def start(record=None, *actions, **options):
        shop = small_shop(item(**(record or {})), item("A2", name="Other Brush"))
        env = WebShopEnv(shop, **options)
        env.reset(task_id=0)
        for action in actions:
            *_, info = env.step(action)
            assert not info["invalid"], action
        return env

    return start


def _clickables(env):
    return env.step("look around")[-1]["available_actions"]["clickables"]


def _page(env):
    return env.step("look around")[0]


START = "WebShop [SEP] Instruction: [SEP] {} [SEP] Search"
HEAD = "Instruction: [SEP] {} [SEP] Back to Search [SEP] "


def test_reset(shop):
    env = WebShopEnv(shop)
    observation, info = env.reset(task_id=3)
    goal = shop.goals("synthetic")[3]
    assert env.goal is goal
    assert observation == START.format(goal.instruction_text)
    assert info["available_actions"] == {"has_search_bar": True, "clickables": ["search"]}
    assert info["invalid"] is False and info["noun_source"] == "file"
    assert env.reset(task_id=3)[0] == observation


def test_reset_draws_by_weight_and_seed(shop):
    env, other = WebShopEnv(shop), WebShopEnv(shop)
    first = [env.reset(seed=5)[0], env.reset()[0], env.reset()[0]]
    assert [other.reset(seed=5)[0], other.reset()[0], other.reset()[0]] == first
    assert len(set(first)) == 3


@pytest.mark.parametrize("task_id", [-1, 614])
def test_unknown_task(shop, task_id):
    with pytest.raises(ValueError, match=f"task_id is {task_id}"):
        WebShopEnv(shop).reset(task_id=task_id)


def test_shop_without_goals(small_shop):
    with pytest.raises(ValueError, match="no goals"):
        WebShopEnv(small_shop(attributes={})).reset(seed=0)


def test_step_before_reset(shop):
    env = WebShopEnv(shop)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("search[x]")
    with pytest.raises(RuntimeError, match="reset"):
        _ = env.instruction_text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"observation_mode": "html"}, "observation_mode is 'html'"),
        ({"goals": "all"}, "goal_set is 'all'"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"results_per_page": 0}, "results_per_page is 0"),
        ({"max_invalid_actions": -1}, "max_invalid_actions is -1"),
    ],
)
def test_bad_arguments(shop, arguments, problem):
    with pytest.raises(ValueError, match=problem):
        WebShopEnv(shop, **arguments)


# Actions


@pytest.mark.parametrize(
    "action",
    [
        "search[brush]",
        "search[BRUSH]",
        "search[brush] now",
        "search[ brush ]",
        "search[brush]\nclick[x]",
    ],
)
def test_searches(play, action):
    env = play()
    observation, reward, terminated, truncated, info = env.step(action)
    assert "Page 1 (Total results: 2)" in observation
    assert (reward, terminated, truncated, info["invalid"]) == (0.0, False, False, False)


@pytest.mark.parametrize(
    "action",
    [
        "",
        "search",
        "search[]",
        "[brush]",
        "search[[brush]]",
        "search[bru[sh]c]",  # the name is what stands before the last bracket
        "Search[brush]",
        " search[brush]",
        "Action: search[brush]",
        "search[bru\nsh]",
        "\nsearch[brush]",
        "click[search]",
        "click[brush]",
        "click[back to search]",
        "buy now",
    ],
)
@pytest.mark.parametrize("strict_compat", [True, False])
def test_actions_without_meaning_on_the_start_page(play, action, strict_compat):
    env = play(strict_compat=strict_compat)
    before = _page(env)
    observation, reward, terminated, truncated, info = env.step(action)
    assert observation == before
    assert (reward, terminated, truncated, info["invalid"]) == (0.0, False, False, True)


def test_spaces_in_arguments(play):
    strict = play({}, "search[brush]")
    assert strict.step("click[ a1 ]")[-1]["invalid"]
    repaired = play({}, "search[  brush ]", "click[ a1 ]", "click[ Description]", strict_compat=False)
    assert repaired.page == "sub"
    assert repaired.step("search[  ]")[-1]["invalid"]


def test_case_of_clicks(play):
    env = play({"options": {"Color": ["Red"]}}, "search[brush]", "click[A1]", "click[RED]", "click[Description]")
    assert env.step("CLICK[< prev]")[-1]["invalid"]


# Pages and transitions


def test_search_from_every_page(play):
    for path in ([], ["click[a1]"], ["click[a1]", "click[features]"], ["click[a1]", "click[buy now]"]):
        env = play({}, "search[brush]", *path)
        assert "Page 1 (Total results: 1)" in env.step("search[other]")[0]


def test_results_pages(play):
    env = play({}, "search[alder brush]", results_per_page=1)
    assert _clickables(env) == ["back to search", "next >", "a1"]
    env.step("click[next >]")
    assert _clickables(env) == ["back to search", "< prev", "next >", "a2"]
    observation, *_ = env.step("click[next >]")  # past the end
    assert observation == HEAD.format(env.goal.instruction_text) + "Page 3 (Total results: 2) [SEP] < Prev [SEP] Next >"
    env.step("click[< prev]")
    env.step("click[a2]")
    assert "Page 2 (Total results: 2)" in env.step("click[< prev]")[0]  # back to the same page
    assert env.step("click[back to search]")[0] == START.format(env.goal.instruction_text)


def test_item_page_and_sub_pages(play):
    record = {"options": {"Color": ["Red", "Blue"], "Fit": []}, "pricing": "$5$7", "name": " Soft Brush "}
    env = play(record, "search[brush]")
    observation, *_ = env.step("click[a1]")
    head = HEAD.format(env.goal.instruction_text)
    item_page = (
        head + "< Prev [SEP] color [SEP] red [SEP] blue [SEP] fit [SEP] Soft Brush [SEP] Price: $5.0 to $7.0 [SEP] "
        "Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    assert observation == item_page
    buttons = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
    assert _clickables(env) == [*buttons, "red", "blue"]
    assert env.step("click[red]")[0] == item_page  # a chosen option does not show in this mode
    for name, text in (
        ("description", "A brush."),
        ("features", "Soft bristles [SEP] Wooden handle"),
        ("reviews", None),
    ):
        expected = head + "< Prev" + (f" [SEP] {text}" if text else "")
        assert env.step(f"click[{name}]")[0] == expected
        assert _clickables(env) == ["back to search", "< prev"]
        assert env.step("click[< prev]")[0] == item_page
    assert env.step("click[attributes]")[-1]["invalid"]
    # Sub pages keep the options, the page of results forgets them.
    assert json.loads(env.step("click[buy now]")[0].split(" [SEP] ")[8]) == {"color": "red"}


@pytest.mark.parametrize("mode", ["text", "text_rich"])
def test_attributes_page(play, mode):
    env = play({}, "search[brush]", "click[a1]", show_attributes=True, observation_mode=mode)
    assert "attributes" in _clickables(env)
    observation, *_ = env.step("click[attributes]")
    pieces = ["soft", "beauty", "hair brushes", "Beauty › Hair Care › Brushes"]
    if mode == "text":
        assert observation == HEAD.format(env.goal.instruction_text) + "< Prev [SEP] " + " [SEP] ".join(pieces)
    else:
        assert observation.endswith("[button] < Prev [button_]\n " + "\n".join(pieces) + "\n")


def test_options_overwrite_and_end_with_the_item(play):
    env = play({"options": {"Color": ["red", "blue"]}}, "search[brush]", "click[a1]", "click[red]", "click[blue]")
    done, *_ = env.step("click[buy now]")
    assert '{"color": "blue"}' in done
    env = play(
        {"options": {"Color": ["red"]}}, "search[brush]", "click[a1]", "click[red]", "click[< prev]", "click[a1]"
    )
    assert "[SEP] {} [SEP]" in env.step("click[buy now]")[0]


def test_done_page(play):
    env = play({"options": {"Size": ["7' <x> & é"], "Color": ["red"]}}, "search[brush]", "click[a1]")
    env.step("click[7' <x> & é]")
    env.step("click[red]")
    observation, reward, terminated, truncated, info = env.step("click[buy now]")
    pieces = observation.split(" [SEP] ")
    assert pieces[:9] == [
        "Thank you for shopping with us!", "Your code:", "None", "(Paste it in your MTurk interface.)", "Purchased",
        "asin", "A1", "options", '{"color": "red", "size": "7\\u0027 \\u003cx\\u003e \\u0026 \\u00e9"}',
    ]  # fmt: skip
    assert pieces[-5:] == ["Reward", "Your score (min 0.0, max 1.0)", str(reward), "Reward Details", "None"]
    assert "instuction text" in pieces
    assert (terminated, truncated) == (True, False)
    assert info["available_actions"] == {"has_search_bar": False, "clickables": []}
    assert isinstance(info["reward_parts"], RewardParts)
    assert info["score"] == reward == info["reward_parts"].reward
    assert info["success"] is (reward == 1.0)
    # The original goes on after the end.
    assert env.step("click[back to search]")[-1]["invalid"]
    observation, reward, terminated, *_ = env.step("search[brush]")
    assert "Page 1" in observation and not terminated


def test_success_is_a_full_score_only(small_shop, item):
    shop = small_shop(item(options={"Size": ["small", "big"]}))
    env = WebShopEnv(shop)
    env.reset(task_id=0)
    for action in ("search[brush]", "click[a1]", f"click[{env.goal.goal_options['size']}]"):
        env.step(action)
    *_, info = env.step("click[buy now]")
    assert (info["score"], info["success"]) == (1.0, True)
    env.reset(task_id=0)
    for action in ("search[brush]", "click[a1]"):
        *_, info = env.step(action)
        assert "score" not in info
    *_, info = env.step("click[buy now]")
    assert (info["score"], info["success"]) == (pytest.approx(2 / 3), False)
    assert info["reward_parts"].r_option == 0.0


def test_the_hidden_price_counts(small_shop, item):
    shop = small_shop(item(pricing="$10$60"), item("A2", pricing="$1$400"), seed=2)
    for task_id, goal in enumerate(shop.goals("synthetic")):
        for asin in shop:
            env = WebShopEnv(shop)
            env.reset(task_id=task_id)
            for action in ("search[brush]", f"click[{asin}]"):
                env.step(action)
            parts = env.step("click[buy now]")[-1]["reward_parts"]
            assert parts.r_price == (shop.prices[asin] <= goal.price_upper)


def test_options_named_like_buttons(play):
    names = ["Description", "Buy Now", "A2", "Search", "< Prev", "Next >", "Attributes"]
    env = play({"options": {"Style": names}}, "search[brush]", "click[a1]")
    buttons = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
    assert _clickables(env) == [*buttons, "a2", "search", "next >", "attributes"]
    assert env.step("click[search]")[-1]["invalid"]
    env.step("click[next >]")
    assert env.page == "item"
    env.step("click[a2]")
    assert env.page == "item"
    env.step("click[attributes]")  # a page that has no button here
    assert env.page == "sub"
    env.step("click[< prev]")
    env.step("click[description]")
    assert "A brush." in _page(env)
    env.step("click[< prev]")
    observation, _, terminated, *_ = env.step("click[buy now]")
    assert terminated and '{"style": "a2"}' in observation


def test_one_value_in_two_groups(play):
    record = {"options": {"Strap": ["black", "blue"], "Color": ["black", "white"]}}
    path = ("search[brush]", "click[a1]", "click[black]")
    assert '{"color": "black"}' in play(record, *path, "click[buy now]").step("look")[0]  # the last group
    assert '{"strap": "black"}' in play(record, *path, "click[buy now]", strict_compat=False).step("look")[0]
    # Repaired, the shared value makes room.
    env = play(record, *path, "click[blue]", "click[buy now]", strict_compat=False)
    assert '{"color": "black", "strap": "blue"}' in _page(env)
    env = play(record, *path, "click[white]", "click[blue]", "click[buy now]", strict_compat=False)
    assert '{"color": "white", "strap": "blue"}' in _page(env)


def test_repaired_clicks_reach_every_combination_in_any_order(play):
    options = {"A": ["x", "y", "z"], "B": ["x", "y"], "C": ["y", "w", "z"]}
    rng = random.Random(0)
    for _ in range(40):
        wanted = [rng.choice(values) for values in options.values()]
        clicks = [f"click[{value}]" for value in rng.sample(wanted, 3)]
        env = play({"options": options}, "search[brush]", "click[a1]", *clicks, "click[buy now]", strict_compat=False)
        chosen = json.loads(_page(env).split(" [SEP] ")[8])
        assert sorted(chosen.values()) == sorted(wanted)
        assert all(value in options[name.upper()] for name, value in chosen.items())


def test_lower_case_asins_can_be_opened(small_shop, item):
    env = WebShopEnv(small_shop(item("b1a")))
    env.reset(task_id=0)
    env.step("search[brush]")
    env.step("click[b1a]")
    assert env.page == "item"


# Special queries


def test_special_queries(shop):
    env = WebShopEnv(shop)
    env.reset(task_id=0)
    category, query = shop.products[0].category, shop.products[0].query
    same_category = sum(product.category == category for product in shop.products)
    assert same_category > 50
    assert f"(Total results: {same_category})" in env.step(f"search[<c> {category} ignored]")[0]
    same_query = [product.asin for product in shop.products if product.query == query]
    observation, *_ = env.step(f"search[<q> {query}]")
    assert f"(Total results: {len(same_query)})" in observation
    assert [piece for piece in observation.split(" [SEP] ") if piece in shop] == same_query[:10]
    assert "(Total results: 0)" in env.step("search[<c>]")[0]
    first, *_ = env.step("search[<r>]")
    assert "(Total results: 50)" in first
    assert env.step("search[<r>]")[0] == first  # equal states, equal text
    plain = env.step("search[<a> gold plated]")[0]
    assert plain == env.step("search[a gold plated]")[0]
    assert env.step("search[x<q> cable]")[0] == env.step("search[x q cable]")[0]


def test_random_query_in_a_small_shop(play):
    assert "(Total results: 2)" in play().step("search[<r>]")[0]


@pytest.mark.parametrize("query", ["<r>", "<c> beauty", "<q> hair brushes", "<a> soft"])
def test_special_queries_are_plain_words_when_repaired(play, query):
    env = play(strict_compat=False)
    assert env.step(f"search[{query}]")[0] == env.step(f"search[{query.replace('<', ' ').replace('>', ' ')}]")[0]


# Rich text


RICH = {"options": {"Color": ["red", "navy blue"], "Trim": ["red", "café", '12" wide']}}


def test_rich_pages(play):
    env = play(RICH, observation_mode="text_rich")
    instruction = env.goal.instruction_text
    assert _page(env) == f"WebShop\nInstruction: \n{instruction}\n[button] Search [button_]\n"
    head = f"Instruction:\n{instruction}\n[button] Back to Search [button_]\n"
    assert env.step("search[alder]")[0] == (
        head + "Page 1 (Total results: 1)\n[button] Next > [button_]\n"
        "\n[button] A1 [button_]\nAlder Hair Brush\n$25.0\n"
    )
    lines = (
        "[button] < Prev [button_]\ncolor\n  [button] red [button_]\n  [button] navy blue [button_]\ntrim\n"
        '  [button] red [button_]\n  [button] café [button_]\n  [button] 12" wide [button_]\n'
        "Alder Hair Brush\nPrice: $25.0\nRating: N.A.\n[button] Description [button_]\n[button] Features [button_]\n"
        "[button] Reviews [button_]\n[button] Buy Now [button_]\n"
    )
    assert env.step("click[a1]")[0] == head + lines
    clicked = lines.replace("[button] red [button_]", "[clicked button] red [clicked button_]")
    red = "You have clicked red.\n"
    assert env.step("click[red]")[0] == red + red + head + clicked  # chosen in one group, clicked in both
    # Later ones on top; values with quotes or other than ASCII characters never show.
    both = clicked.replace("[button] navy blue [button_]", "[clicked button] navy blue [clicked button_]")
    assert env.step("click[navy blue]")[0] == f"{red}You have clicked navy blue.\n{red}{head}{both}"
    only_blue = lines.replace("[button] navy blue [button_]", "[clicked button] navy blue [clicked button_]")
    for value in ("café", '12" wide'):
        assert env.step(f"click[{value}]")[0] == "You have clicked navy blue.\n" + head + only_blue
    assert env.step("click[features]")[0] == head + "[button] < Prev [button_]\n Soft bristles\n Wooden handle\n"
    assert env.step("click[< prev]")[0].startswith("You have clicked navy blue.\n")
    assert "\n[clicked button] A1 [clicked button_]\n" in env.step("click[< prev]")[0]
    assert "\n[clicked button] A1 [clicked button_]\n" in env.step("search[hair]")[0]  # a search does not forget it
    env.step("click[back to search]")
    assert "\n[button] A1 [button_]\n" in env.step("search[hair]")[0]  # the start page does


def test_quoted_words_of_the_query_show_as_clicked(play):
    env = play(RICH, 'search["red" brush]', observation_mode="text_rich")
    assert env.step("click[a1]")[0].startswith("You have clicked red.\n")
    env = play(RICH, 'search[brush "navy blue"]', observation_mode="text_rich")
    assert env.step("click[a1]")[0].startswith("Instruction:")  # the words are joined by "+" there


def test_a_group_name_of_the_chosen_option_shows_as_clicked(play):
    env = play({"options": {"Color": ["color", "red"]}}, "search[brush]", "click[a1]", observation_mode="text_rich")
    assert env.step("click[red]")[0].startswith("You have clicked red.\nYou have clicked color.\n")


# White space


@pytest.mark.parametrize(
    ("bullets", "text", "rich"),
    [
        ([""], " [SEP] ", " \n"),  # a bullet has a space before it, so this is one space
        (["x", " ", "y"], " [SEP] x [SEP]  [SEP] y", " x\n \n y\n"),
        (["\n", " \n "], "", ""),  # white space with a line end vanishes
        (["\t"], " [SEP] ", " \n"),
        (["  two  "], " [SEP] two", "   two  \n"),
        (["\u00a0"], " [SEP] ", " \u00a0\n"),  # not the white space of HTML
        ([], "", ""),
        ("one text", " [SEP] one text", " one text\n"),
        (["a & b <b>c</b>"], " [SEP] a & b <b>c</b>", " a & b <b>c</b>\n"),
    ],
)
def test_white_space_of_bullets(play, bullets, text, rich):
    path = ("search[brush]", "click[a1]", "click[features]")
    env = play({"small_description": bullets}, *path)
    assert _page(env) == HEAD.format(env.goal.instruction_text) + "< Prev" + text
    env = play({"small_description": bullets}, *path, observation_mode="text_rich")
    assert _page(env).endswith("[button] < Prev [button_]\n" + rich)


@pytest.mark.parametrize(
    ("description", "text"),
    [("", ""), (" ", " [SEP] "), ("\n", ""), ("  a\nb  ", " [SEP] a\nb")],
)
def test_white_space_of_descriptions(play, description, text):
    env = play({"full_description": description}, "search[brush]", "click[a1]", "click[description]")
    assert _page(env) == HEAD.format(env.goal.instruction_text) + "< Prev" + text


def test_empty_option_value(play):
    env = play({"options": {"Size": ["", "s"]}}, "search[brush]", "click[a1]")
    assert " [SEP] size [SEP] s [SEP] " in _page(env)
    assert _clickables(env)[-2:] == ["", "s"]


# Ends


def test_step_limit(play):
    """It is part of the task: what is bought later counts for nothing."""
    env = play({}, max_steps=3)
    assert env.step("search[brush]")[2:4] == (False, False)
    assert env.step("nothing")[2:4] == (False, False)
    _, reward, terminated, truncated, info = env.step("click[a1]")
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert (info["score"], info["success"]) == (0.0, False) and "reward_parts" not in info
    env.reset(task_id=0)
    assert not env.step("search[brush]")[2]


def test_a_purchase_in_the_last_step_counts(play):
    env = play({}, "search[brush]", "click[a1]", max_steps=3, max_invalid_actions=1)
    _, reward, terminated, truncated, info = env.step("click[buy now]")
    assert (terminated, truncated) == (True, False)
    assert info["score"] == reward > 0


def test_no_limits_by_default(play):
    env = play()
    assert not any(any(env.step("nothing")[2:4]) for _ in range(100))


def test_invalid_actions_end_an_episode(play):
    env = play({}, max_invalid_actions=2)
    assert env.step("nothing")[2:4] == (False, False)
    assert env.step("search[brush]")[2:4] == (False, False)
    _, _, terminated, truncated, info = env.step("click[unknown]")
    assert (terminated, truncated, info["invalid"], info["score"], info["success"]) == (True, False, True, 0.0, False)
    env.reset(task_id=0)
    assert not env.step("nothing")[2]


# Sharing


def test_sessions_do_not_disturb_each_other(shop):
    rng = random.Random(0)
    together = [WebShopEnv(shop, observation_mode="text_rich") for _ in range(3)]
    alone = WebShopEnv(shop, observation_mode="text_rich")
    histories = [[env.reset(task_id=task_id)[0]] for task_id, env in enumerate(together)]
    actions = [[] for _ in together]
    for _ in range(25):
        for number, env in enumerate(together):
            shown = env.step("look")[-1]["available_actions"]
            choices = shown["clickables"] if not shown["has_search_bar"] else []
            action = f"click[{rng.choice(choices)}]" if choices else f"search[{env.goal.query}]"
            actions[number].append(action)
            histories[number].append(env.step(action)[0])
    for task_id, (history, played) in enumerate(zip(histories, actions, strict=True)):
        assert [alone.reset(task_id=task_id)[0], *(alone.step(action)[0] for action in played)] == history


def test_what_a_caller_does_with_info_changes_nothing(play):
    env = play({}, "search[alder brush]")
    env.step("look")[-1]["available_actions"]["clickables"].clear()
    assert _clickables(env) == ["back to search", "next >", "a1", "a2"]


def test_instruction_text(play):
    env = play()
    assert env.instruction_text == "Instruction: " + env.goal.instruction_text
    env.step("search[brush]")
    assert env.instruction_text == "Instruction:" + env.goal.instruction_text
