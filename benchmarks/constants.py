"""Measures what half and twice the value of every constant of the core changes.

    make bench NAME=constants                                       # all constants; some hours on two cores
    make bench NAME=constants ARGS="--only search.gated inversion.pool"
    make bench NAME=constants ARGS="--only inversion.evidence auditing.claims --hostile 1"

A constant is a number that a module of ``spearpp.inversion``, ``spearpp.search``, ``spearpp.linalg`` or
``spearpp.auditing`` assigns to a name in capitals. Every variation runs in a process of its own, which compiles the
module with the changed number before anything imports it. The distance from 1 is varied for a number between 0.5 and 1.
A tuple has one variation for each of its numbers. Only clients whose attack uses the constant are attacked.

The clients of the benchmark cover the searches, the claims and the kinds of noise (``constants_clients.CLIENTS``). With
--hostile N, N updates of each family of ``hostile_clients`` are audited too. Three numbers describe a variation:

- recovered: by how much the number of inputs with a claim changes, over all clients whose attack calls a function that
  uses the constant;
- wrong: claimed inputs that are farther than three times their stated error from every sample, and the faults that
  ``make bench NAME=hostile`` counts;
- steps: steps of all searches, relative to those with the constants as they are.
"""

import ast
import importlib.abc
import importlib.machinery
import json
import multiprocessing
import operator
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch

# Nothing of spearpp is imported here, because every process first decides which module it changes.

ROOT = Path(__file__).parents[1] / "src"
PACKAGES = ("inversion", "search", "linalg", "auditing")
"""The packages whose constants are varied."""
FACTORS = (0.5, 2.0)
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Pow: operator.pow,
    ast.Mult: operator.mul,
    ast.Sub: operator.sub,
    ast.Div: operator.truediv,
}
"""The operators in the values of constants."""


@dataclass(frozen=True)
class Constant:
    """One number of one constant."""

    module: str
    name: str
    index: int | None
    """Which number of a tuple; None if the constant is one number."""
    value: float

    @property
    def label(self) -> str:
        """Return the module and the name, without the name of the package."""
        index = "" if self.index is None else f"[{self.index}]"
        return f"{self.module.removeprefix('spearpp.')}.{self.name}{index}"

    def times(self, factor: float) -> float:
        """Return the number multiplied by the factor, or its distance from 1 if it is between 0.5 and 1."""
        if 0.5 < self.value < 1:
            return 1 - (1 - self.value) * factor
        return round(self.value * factor) if isinstance(self.value, int) else self.value * factor


@dataclass(frozen=True)
class Row:
    """What one value of one constant gave."""

    constant: str
    value: float
    clients: int
    """Number of clients whose attack uses the constant. Only these are attacked."""
    recovered: int
    """Change of the number of inputs with a claim."""
    wrong: int
    steps: float
    different: str
    """Clients with other numbers of claims than with the constants as they are, with the difference."""


def constants(only: Sequence[str] = ()) -> list[Constant]:
    """Return the constants of the core, or those whose label contains one of the words."""
    found = []
    for package in PACKAGES:
        for file in sorted((ROOT / "spearpp" / package).rglob("*.py")):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for target, expression in _assignments(ast.parse(file.read_text())):
                value = _number(expression)
                for index, each in enumerate(value if isinstance(value, tuple) else (value,)):
                    if each is not None:
                        found.append(Constant(module, target.id, index if isinstance(value, tuple) else None, each))
    return [each for each in found if not only or any(word in each.label for word in only)]


def _assignments(tree: ast.Module) -> Iterator[tuple[ast.Name, ast.expr]]:
    """Yield the names in capitals that a module assigns, with their values."""
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        pairs = [(node.targets[0], node.value)]
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(node.targets[0].elts, node.value.elts, strict=True))
        yield from ((name, value) for name, value in pairs if isinstance(name, ast.Name) and name.id.isupper())


def _number(expression: ast.expr) -> Any:
    """Return the value of an expression of numbers: a number or a tuple of numbers. None for other expressions."""
    if isinstance(expression, ast.Tuple):
        numbers = tuple(_number(each) for each in expression.elts)
        return None if None in numbers else numbers
    if isinstance(expression, ast.BinOp) and type(expression.op) in OPERATORS:
        left, right = _number(expression.left), _number(expression.right)
        return None if left is None or right is None else OPERATORS[type(expression.op)](left, right)
    value = expression.value if isinstance(expression, ast.Constant) else None
    return value if type(value) in (int, float) else None


class Changed(importlib.abc.MetaPathFinder):
    """Compiles one module with another value of one constant."""

    def __init__(self, constant: Constant, value: float) -> None:
        self.constant, self.value = constant, value

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> Any:
        """Return the specification of the changed module, and None for all others."""
        del target
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname == self.constant.module else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
            spec.loader.code = self.code(Path(spec.origin))
        return spec

    def code(self, file: Path) -> CodeType:
        """Return the code of the module with the changed constant."""
        tree = ast.parse(file.read_text())
        for target, expression in _assignments(tree):
            if target.id == self.constant.name:
                old: ast.expr = expression
                if self.constant.index is not None and isinstance(expression, ast.Tuple):
                    old = expression.elts[self.constant.index]
                new = ast.copy_location(ast.Constant(self.value), old)
                return compile(ast.fix_missing_locations(_Replace(old, new).visit(tree)), str(file), "exec")
        raise ValueError(f"{self.constant.label} is not in {file}")


class _Loader(importlib.machinery.SourceFileLoader):
    code: CodeType

    def get_code(self, fullname: str) -> CodeType:
        del fullname
        return self.code


class _Replace(ast.NodeTransformer):
    """Replaces one expression of a tree."""

    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        """Return the new expression instead of the old one."""
        return self.new if node is self.old else self.generic_visit(node)


Task = tuple[Constant, float, tuple[str, ...], Namespace]


def run(task: Task) -> tuple[Constant, float, dict[str, Counter[str]]]:
    """Attack some clients with one variation."""
    constant, value, names, options = task
    torch.set_num_threads(1)
    sys.meta_path.insert(0, Changed(constant, value))
    from benchmarks.constants_clients import clients, measure

    return constant, value, measure(clients(options.data, options.hostile, options.first), names)


def run_unchanged(options: Namespace) -> tuple[dict[str, Counter[str]], dict[str, set[str]]]:
    """Attack all clients with the constants as they are.

    Returns:
        The counts of each client, and the clients whose attack called a function that uses a constant, by its label.
    """
    torch.set_num_threads(1)
    from benchmarks.constants_clients import clients, recorded

    found: dict[str, Counter[str]] = {}
    reached: dict[str, set[str]] = {}
    for name, attack in clients(options.data, options.hostile, options.first).items():
        began = time.monotonic()
        found[name], called = recorded(attack)
        print(f"# {name}: {dict(found[name])}, {time.monotonic() - began:.2f} s", file=sys.stderr, flush=True)
        for label in {each for code in called for each in _used(code)}:
            reached.setdefault(label, set()).add(name)
    return found, reached


def _used(code: CodeType) -> Iterator[str]:
    """Yield the modules and names of all constants that a function uses."""
    if ROOT not in (file := Path(code.co_filename)).parents:
        return
    homes = _homes(file)
    yield from (homes[name] for name in code.co_names if name in homes)


@cache
def _homes(file: Path) -> dict[str, str]:
    """Return the module in which each name in capitals is assigned, followed by the name, for the names of a file."""
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    tree = ast.parse(file.read_text())
    homes = {target.id: f"{module}.{target.id}" for target, _ in _assignments(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            homes |= {each.name: f"{node.module}.{each.name}" for each in node.names if each.name.isupper()}
    return homes


def row(constant: Constant, value: float, found: dict[str, Counter[str]], usual: dict[str, Counter[str]]) -> Row:
    """Compare a variation with the constants as they are."""
    now, before = (sum((each[name] for name in found), Counter[str]()) for each in (found, usual))
    changes = {name: counts["recovered"] - usual[name]["recovered"] for name, counts in found.items()}
    different = [f"{name} {change:+d}" for name, change in changes.items() if change]
    different += [f"{name}: crash" for name, counts in found.items() if counts["crashes"]]
    gained, steps = now["recovered"] - before["recovered"], now["steps"] / max(1, before["steps"])
    return Row(constant.label, value, len(found), gained, now["wrong"], steps, ", ".join(different))


def main() -> int:
    """Vary the constants that were asked for."""
    options = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", default=[], help="words; constants whose label contains one of them")
    options.add_argument("--hostile", type=int, default=0, help="number of updates of each hostile family")
    options.add_argument("--first", type=int, default=1000, help="first seed")
    options.add_argument("--data", help="CIFAR-10 npz file or its folder; default: the path in SPEARPP_DATA")
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--list", action="store_true", help="only list the constants")
    options.add_argument("--out", type=Path, help="write the rows to this file as JSON")
    given = options.parse_args()
    chosen = constants(given.only)
    if given.list:
        print("\n".join(f"{each.label} = {each.value}" for each in chosen))
        return 0
    rows: list[Row] = []
    with multiprocessing.get_context("fork").Pool(given.processes, maxtasksperchild=1) as pool:
        usual, reached = pool.apply(run_unchanged, (given,))
        total = sum(usual.values(), Counter[str]())
        print("| constant | value | clients | recovered | wrong | steps | clients with other claims |")
        print("|---|---|---|---|---|---|---|")
        print(f"| as they are | | {len(usual)} | {total['recovered']} | {total['wrong']} | 1 | |", flush=True)
        tasks: list[Task] = []
        for constant in chosen:
            names = tuple(name for name in usual if name in reached.get(f"{constant.module}.{constant.name}", ()))
            values = [constant.times(factor) for factor in FACTORS]
            tasks += [(constant, value, names, given) for value in values if names and value != constant.value]
            if not names:
                print(f"| {constant.label} = {constant.value:g} | | 0 | | | | |", flush=True)
        for constant, value, found in pool.imap(run, tasks, chunksize=1):
            each = row(constant, value, found, usual)
            rows.append(each)
            print(f"| {each.constant} = {constant.value:g} | {value:g} | {each.clients} | {each.recovered:+d} ", end="")
            print(f"| {each.wrong} | {each.steps:.2f} | {each.different} |", flush=True)
            if given.out:
                given.out.write_text(json.dumps([asdict(each) for each in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
