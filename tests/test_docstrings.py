"""Docstrings: in the pipeline they name parameters and exceptions of public functions, and a package names its
modules."""

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "impala_llm"
TREES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
BASES = {
    node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
}
"""Names of the base classes of each class of the package."""
MAKES = {
    node.name: node.returns.id
    for tree in TREES.values()
    for node in tree.body
    if isinstance(node, ast.FunctionDef) and isinstance(node.returns, ast.Name)
}
"""Name of the class that each function of the package makes, by its annotation: some make exceptions."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Documented:
    """A public function with a docstring; that of `__init__` is its own and its class's."""

    name: str
    function: Function
    docstring: str

    def parameters(self) -> list[str]:
        """Names of the parameters, without those that the caller does not give: self, cls, numba's `typing`."""
        arguments = self.function.args
        named = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
        return [each.arg for each in named if each is not None and each.arg not in ("self", "cls", "typing")]

    def entries(self) -> list[str]:
        """Names that have an entry under Args."""
        sections = re.findall(r"^Args:\n((?:    .*\n|\n)*)", self.docstring + "\n", re.MULTILINE)
        lists = re.findall(r"^    ([\w, ]+):", "".join(sections), re.MULTILINE)
        return [name for names in lists for name in names.split(", ")]

    def raised(self) -> set[str]:
        """Names of the exceptions that it makes and raises itself."""
        raises = (node for node in own_nodes(self.function) if isinstance(node, ast.Raise))
        made = (node.exc.func for node in raises if isinstance(node.exc, ast.Call))
        return {MAKES.get(made_by.id, made_by.id) for made_by in made if isinstance(made_by, ast.Name)}

    def says(self, word: str) -> bool:
        """Whether the word stands in the docstring."""
        return re.search(rf"\b{re.escape(word)}\b", self.docstring) is not None


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below this one, without those of functions defined in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda):
            yield child
            yield from own_nodes(child)


def with_bases(exception: str) -> set[str]:
    """Names of an exception's class and of its base classes, except those that say nothing."""
    found = {exception}
    for base in BASES.get(exception, []):
        found |= with_bases(base)
    if isinstance(known := getattr(builtins, exception, None), type):
        found |= {base.__name__ for base in known.__mro__}
    return found - {"Exception", "BaseException", "object"}


def documented(tree: ast.Module, file: str) -> Iterator[Documented]:
    """Public functions of a module and public methods of its public classes, if they have a docstring."""
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_") and (text := ast.get_docstring(node)):
            yield Documented(f"{file}: {node.name}", node, text)
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        for method in node.body:
            if not isinstance(method, Function) or (method.name.startswith("_") and method.name != "__init__"):
                continue
            texts = [ast.get_docstring(each) for each in ((node, method) if method.name == "__init__" else (method,))]
            if text := "\n".join(filter(None, texts)):
                yield Documented(f"{file}: {node.name}.{method.name}", method, text)


PIPELINE = [each for file, tree in TREES.items() if file.startswith("pipeline/") for each in documented(tree, file)]


def test_each_parameter_stands_in_the_docstring() -> None:
    """A single parameter needs no entry: its name and type describe it."""
    assert len(PIPELINE) > 200, "the search finds functions"
    several = [(each, names) for each in PIPELINE if len(names := each.parameters()) > 1]
    missing = {each.name: left for each, names in several if (left := [n for n in names if not each.says(n)])}
    assert missing == {}


def test_what_stands_under_args_is_a_parameter() -> None:
    found = [(each, entries) for each in PIPELINE if (entries := each.entries())]
    assert len(found) > 100, "the search finds sections"
    strange = {each.name: left for each, names in found if (left := sorted({*names} - {*each.parameters()}))}
    assert strange == {}


def test_each_exception_stands_in_the_docstring() -> None:
    raising = [(each, name) for each in PIPELINE for name in sorted(each.raised())]
    assert len(raising) > 20, "the search finds raised exceptions"
    missing = [(each.name, name) for each, name in raising if not any(map(each.says, with_bases(name)))]
    assert missing == []


@pytest.mark.parametrize(
    "package",
    [
        *("algorithms", "engines/embedded", "engines/sglang", "gateway", "learning", "observability", "replay"),
        *("pipeline/network", "pipeline/shm", "pipeline/tickets", "pipeline/transport", "pipeline/weights"),
    ],
)
def test_a_package_says_what_each_of_its_modules_is_for(package: str) -> None:
    said = ast.get_docstring(TREES[f"{package}/__init__.py"]) or ""
    modules = {path.stem for path in (PACKAGE / package).glob("[!_]*.py")}
    assert [name for name in sorted(modules) if not re.search(rf"\b{name}\b", said)] == []
