"""Docstrings: in the pipeline and the algorithms they have an entry for each parameter and exception of a public
function, and a package names its modules."""

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
    """A public function and its docstring, which may be empty; that of `__init__` is its own and its class's."""

    name: str
    function: Function
    docstring: str
    of_class: str | None = None
    """Name of the class of a method."""
    stands_for: tuple[str, ...] = ()
    """Names of the classes that its class derives from, or that the class's docstring names: such as Protocols."""

    def parameters(self) -> list[str]:
        """Names of the parameters, without those that the caller does not give: self, cls, numba's `typing`."""
        arguments = self.function.args
        named = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
        return [each.arg for each in named if each is not None and each.arg not in ("self", "cls", "typing")]

    def entries(self, section: str) -> list[str]:
        """Names that have an entry under Args or Raises; of `zmq.ZMQError` the last part."""
        sections = re.findall(rf"^{section}:\n((?:    .*\n|\n)*)", self.docstring + "\n", re.MULTILINE)
        lists = re.findall(r"^    (\w[\w., ]*):", "".join(sections), re.MULTILINE)
        return [name.rpartition(".")[2] for names in lists for name in names.split(", ")]

    def raised(self) -> set[str]:
        """Names of the exceptions that it makes and raises itself."""
        raised = [node.exc for node in own_nodes(self.function) if isinstance(node, ast.Raise)]
        made_by = [each.func if isinstance(each, ast.Call) else each for each in raised]
        names = {MAKES.get(each.id, each.id) for each in made_by if isinstance(each, ast.Name)}
        return {name for name in names if name in BASES or hasattr(builtins, name)} - {"NotImplementedError"}


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below this one, without those of functions defined in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda):
            yield child
            yield from own_nodes(child)


def with_bases(exception: str) -> set[str]:
    """Names of an exception's class and of its base classes, except those that every exception has."""
    found = {exception}
    for base in BASES.get(exception, []):
        found |= with_bases(base)
    if isinstance(known := getattr(builtins, exception, None), type):
        found |= {base.__name__ for base in known.__mro__}
    return found - {"Exception", "BaseException", "object"}


def public_functions(tree: ast.Module, file: str) -> Iterator[Documented]:
    """Public functions of a module, and public methods of its public classes."""
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield Documented(f"{file}: {node.name}", node, ast.get_docstring(node) or "")
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        of_class = ast.get_docstring(node) or ""
        others = (*with_bases(node.name) - {node.name}, *re.findall(r"`(\w+)`", of_class))
        for method in node.body:
            if not isinstance(method, Function) or (method.name.startswith("_") and method.name != "__init__"):
                continue
            texts = [ast.get_docstring(method) or "", of_class if method.name == "__init__" else ""]
            text = "\n".join(filter(None, texts))
            yield Documented(f"{file}: {node.name}.{method.name}", method, text, node.name, others)


FUNCTIONS = [
    each
    for file, tree in TREES.items()
    if file.startswith(("pipeline/", "algorithms/"))
    for each in public_functions(tree, file)
]
METHODS = {(each.of_class, each.function.name) for each in FUNCTIONS if each.of_class and each.docstring}
"""(class, method) of all methods that have a docstring."""


def test_each_parameter_of_several_has_an_entry_under_args() -> None:
    """A single parameter needs no entry. A method without docstring needs none if its base class or Protocol has it."""
    assert len(FUNCTIONS) > 300, "the search finds functions"
    missing = {}
    for each in FUNCTIONS:
        names = each.parameters()
        is_documented_elsewhere = any((name, each.function.name) in METHODS for name in each.stands_for)
        if len(names) < 2 or (not each.docstring and is_documented_elsewhere):
            continue
        if left := [name for name in names if name not in each.entries("Args")]:
            missing[each.name] = left
    assert missing == {}


def test_each_entry_under_args_is_a_parameter() -> None:
    found = [(each, entries) for each in FUNCTIONS if (entries := each.entries("Args"))]
    assert len(found) > 200, "the search finds sections"
    strange = {each.name: left for each, names in found if (left := sorted({*names} - {*each.parameters()}))}
    assert strange == {}


def test_each_exception_has_an_entry_under_raises() -> None:
    raising = [(each, name) for each in FUNCTIONS for name in sorted(each.raised())]
    assert len(raising) > 40, "the search finds raised exceptions"
    missing = [(each.name, name) for each, name in raising if not with_bases(name) & {*each.entries("Raises")}]
    assert missing == []


@pytest.mark.parametrize(
    "package",
    [
        *("algorithms", "checks", "commands", "engines/embedded", "engines/sglang", "evaluation", "gateway"),
        *("learning", "learning/checkpoints", "observability", "processes", "replay"),
        *("pipeline/network", "pipeline/shm", "pipeline/tickets", "pipeline/transport", "pipeline/weights"),
    ],
)
def test_a_package_says_what_each_of_its_modules_is_for(package: str) -> None:
    said = ast.get_docstring(TREES[f"{package}/__init__.py"]) or ""
    modules = {path.stem for path in (PACKAGE / package).glob("[!_]*.py")}
    assert [name for name in sorted(modules) if not re.search(rf"\b{name}\b", said)] == []
