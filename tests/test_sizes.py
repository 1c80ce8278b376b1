"""Limits of size, which keep the code readable: lines of a file and of a function, parameters of a function."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "impala_llm"
MOST_LINES, MOST_LINES_OF_FUNCTION, MOST_PARAMETERS = 450, 60, 8
SAYS_WHY = " long"
"""In the first lines of the docstring of a longer file stands why it is."""
MOST_LINES_BEFORE = 4
TEXTBOOK = {("algorithms/vtrace.py", "vtrace"), ("algorithms/vtrace.py", "vtrace_packed")}
"""Public functions with the arguments of their paper, by name."""
FILES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
FILES |= {f"tools/{path.name}": path.read_text() for path in sorted(PACKAGE.with_name("tools").glob("*.py"))}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: str) -> Iterator[Function]:
    """All functions that Python runs: a compiled loop is long where calls in it would cost."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function) and not any("compiled" in ast.dump(d) for d in node.decorator_list):
            yield node


def num_parameters(function: Function) -> int:
    """Parameters without self or cls."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_short_or_says_why_not(name: str) -> None:
    source = FILES[name]
    num_lines = source.count("\n")
    if num_lines > MOST_LINES:  # those few alone are parsed
        reason = ast.get_docstring(ast.parse(source)) or ""
        first = "\n".join(reason.splitlines()[:MOST_LINES_BEFORE])
        assert SAYS_WHY in first, f"{num_lines} lines: divide it, or say in the first lines why it is so long"


@pytest.mark.system
def test_functions_are_short_and_have_few_parameters() -> None:
    found = [(name, each) for name, source in FILES.items() for each in functions(source)]
    assert len(found) > 1000, "the search finds functions"
    long = {(name, f.name, n) for name, f in found if (n := f.end_lineno - f.lineno + 1) > MOST_LINES_OF_FUNCTION}
    many = {(name, f.name, n) for name, f in found if (n := num_parameters(f)) > MOST_PARAMETERS}
    assert long == set()
    assert {(name, function) for name, function, _ in many} == TEXTBOOK
