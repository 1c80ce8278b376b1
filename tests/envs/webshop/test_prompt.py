"""Page formats and the reading of answers: written-out pages, and every page of a walk through the shop."""

import random

import pytest

from impala_llm.envs.webshop import WebShopEnv, synthetic_catalogue
from impala_llm.envs.webshop.prompt import (
    NOTHING_HAPPENED,
    clicked_row,
    compact,
    delta,
    parse_action,
    without_instruction,
)

RICH_START = "WebShop\nInstruction: \nfind a red hat\n[button] Search [button_]\n"
RICH_RESULTS = """Instruction:
find a red hat
[button] Back to Search [button_]
Page 1 (Total results: 2)
[button] Next > [button_]

[button] B0A [button_]
Soft Hat
$5.0 to $7.5

[clicked button] B0B [clicked button_]
Warm Hat
$9.0
"""
RICH_ITEM = """You have clicked red.
Instruction:
find a red hat
[button] Back to Search [button_]
[button] < Prev [button_]
color
  [clicked button] red [clicked button_]
  [button] blue [button_]
size
  [button] small [button_]
Soft Hat
Price: $5.0 to $7.5
Rating: N.A.
[button] Description [button_]
[button] Features [button_]
[button] Reviews [button_]
[button] Buy Now [button_]
"""
RICH_ITEM_BEFORE = RICH_ITEM.replace("clicked button", "button").replace("You have clicked red.\n", "")
RICH_REVIEWS = "Instruction:\nfind a red hat\n[button] Back to Search [button_]\n[button] < Prev [button_]\n"
TEXT_START = "WebShop [SEP] Instruction: [SEP] find a red hat [SEP] Search"
TEXT_ITEM = "Instruction: [SEP] find a red hat [SEP] Back to Search [SEP] color [SEP] red [SEP] Soft Hat [SEP] Buy Now"


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("search[red hat]", "search[red hat]"),
        ("I think search[red hat] is best, but no: click[b0a]", "click[b0a]"),
        ("Let me look.\nclick[< prev]\n", "click[< prev]"),
        (" click[buy now]", "click[buy now]"),
        ("click[size [large]]", "click[size [large]]"),
        ("so click[size [large]] it is", "click[size [large]]"),
        ("click[red] or [blue]", "click[red] or [blue]"),  # as it came: the shop's own grammar decides
        ("Then click[red] and click[unfinished", "click[red]"),
        ("click[a[b]", "click[a[b]"),
        ("buy it", "buy it"),
        ("", ""),
    ],
)
def test_parse_action(answer, action):
    assert parse_action(answer) == action


def test_compact_start():
    assert compact(RICH_START) == "WebShop\nInstruction: find a red hat"


def test_compact_results():
    assert compact(RICH_RESULTS) == (
        "Instruction: find a red hat\nPage 1 (Total results: 2)\nSoft Hat $5.0 to $7.5 B0A\nWarm Hat $9.0 B0B"
    )


def test_compact_item_shows_chosen_options_in_brackets():
    body = "\nsize: small\nSoft Hat\nPrice: $5.0 to $7.5"
    assert compact(RICH_ITEM) == "Instruction: find a red hat\ncolor: [red], blue" + body
    assert compact(RICH_ITEM_BEFORE) == "Instruction: find a red hat\ncolor: red, blue" + body


def test_compact_page_without_anything():
    assert compact(without_instruction(RICH_REVIEWS, "find a red hat")) == "Nothing here."


@pytest.mark.parametrize("page", [RICH_START, RICH_RESULTS, RICH_ITEM, TEXT_START, TEXT_ITEM])
def test_without_instruction(page):
    rest = without_instruction(page, "find a red hat")
    assert "nstruction" not in rest and "find a red hat" not in rest
    for piece in ("Back to Search", "color", "Soft Hat", "Search"):
        assert (piece in rest) == (piece in page)
    assert without_instruction("Thank you for shopping with us!", "find a red hat") == "Thank you for shopping with us!"


def test_delta_names_the_clicked_option():
    assert delta(RICH_ITEM_BEFORE, RICH_ITEM, "click[Red]", invalid=False) == "You have clicked red."
    assert delta(TEXT_ITEM, TEXT_ITEM, "click[red] please", invalid=False) == "You have clicked red."


def test_delta_needs_the_whole_page_when_it_changed():
    assert delta(RICH_RESULTS, RICH_ITEM_BEFORE, "click[b0a]", invalid=False) is None
    assert delta(RICH_RESULTS, RICH_RESULTS, "search[red hat]", invalid=False) is None


def test_delta_of_an_invalid_action():
    assert delta(RICH_ITEM, RICH_ITEM, "click[green]", invalid=True) == NOTHING_HAPPENED


def test_compact_pages_of_the_shop_show_all_that_can_be_clicked():
    standing = {"search", "back to search", "< prev", "next >", "description", "features", "reviews", "buy now"}
    env = WebShopEnv(synthetic_catalogue(200), observation_mode="text_rich", results_per_page=5)
    rng = random.Random(0)
    for task_id in range(30):
        observation, info = env.reset(task_id)
        for _ in range(12):
            clickables = info["available_actions"]["clickables"]
            page = compact(observation)
            assert len(page) < len(observation)
            assert env.goal.instruction_text in page
            assert all(name in page.lower() for name in clickables if name not in standing)
            choices = [name for name in clickables if name not in ("search", "buy now")]
            action = f"click[{rng.choice(choices)}]" if choices and rng.random() < 0.9 else f"search[{env.goal.query}]"
            observation, _, _, _, info = env.step(action)


def test_rows_end_in_their_numbers_in_brackets_once_opened():
    assert compact(RICH_RESULTS, row_numbers=True).splitlines()[-2:] == [
        "Soft Hat $5.0 to $7.5 1",
        "Warm Hat $9.0 [2]",
    ]
    assert compact(RICH_ITEM, row_numbers=True) == compact(RICH_ITEM)


@pytest.mark.parametrize(
    ("action", "played"),
    [
        ("click[2]", "click[b0b]"),
        ("click[ 1 ]", "click[b0a]"),
        ("click[0]", "click[0]"),
        ("click[3]", "click[3]"),
        ("click[b0b]", "click[b0b]"),
        ("click[2 pack]", "click[2 pack]"),
        ("search[2]", "search[2]"),
    ],
)
def test_a_number_clicks_the_result_of_its_row(action, played):
    assert clicked_row(action, ["b0a", "b0b"]) == played
    assert clicked_row(action, []) == action  # on other pages a number may be an option, such as a shoe size
