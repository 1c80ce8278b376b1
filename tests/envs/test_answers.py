"""The part of an answer that counts: neither thoughts nor, in a text game, the words behind the command."""

import pytest

from impala_llm.envs.answers import after_thoughts, final, first_line, number


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("go north", "go north"),
        ("<think>\ntake lamp?\n</think>\n\ngo north\nand then east", "go north"),
        ("take lamp? no</think> go north ", "go north"),
        ("<think>one</think>two<think>three</think>\ngo north", "go north"),
        ("\n \n go north", "go north"),
        ("<think>\ngo north", "<think>"),
        ("<think>go north</think>\n\n", ""),
        ("", ""),
    ],
)
def test_a_command_is_the_first_line_after_the_thoughts(text: str, said: str) -> None:
    assert first_line(text) == said


def test_thoughts_are_no_part_of_an_answer() -> None:
    assert after_thoughts(" b\n") == " b\n" and after_thoughts("a</think>\n\nb ") == "b "
    assert final("<answer>a</answer></think> b") == "b"
    assert final("<think>a</think> <answer>b</answer>") == "b"


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("value3", "3"),
        ("x: 12 (file7)", "7"),
        ("Type3", "3"),
        ("take -2e3 of them", "-2000"),
        ("1e3e4", "4"),
        ("1,200 and .5E-1.", "0.05"),
    ],
)
def test_an_exponent_is_one_only_behind_the_digits_of_its_number(said: str, right: str) -> None:
    assert number(said, {"answer": right}) == 1.0
    assert number(said, {"answer": "31"}) == 0.0


def test_an_answer_without_a_number_is_wrong() -> None:
    assert number("none, e. g. -.", {"answer": "0"}) == 0.0
