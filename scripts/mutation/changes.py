"""What can be changed in a source file, one small change at a time, and what each change is called.

A mutant's *key* is its file, the function, and the code before and after: it stays when lines move. The
same change a second time in one function has ``#2`` behind it, and so on.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass

__all__ = ["Mutant", "keys_of", "mutants_of"]

_Place = tuple[ast.AST, str, int | None]

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
}  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.Lambda)
_TARGETS = (ast.Attribute, ast.Subscript, ast.Tuple)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed file."""

    key: str
    """``file::function: before -> after``."""
    file: str
    """Where the file lies, from the repository's root."""
    lines: frozenset[int]
    """The lines that have to run for the change to matter."""
    source: str
    """The whole file, changed."""

    @property
    def scope(self) -> str:
        """The file and the function."""
        return self.key.split(": ")[0]


def mutants_of(file: str, source: str, wanted: Container[str] | None = None) -> Iterator[Mutant]:
    """The mutants of a file; ``wanted``: only those of these keys."""
    tree = ast.parse(source)
    for key, node, new, place in _keyed(file, tree):
        if wanted is None or key in wanted:
            _put(*place, new)
            changed = ast.unparse(tree)
            _put(*place, node)
            yield Mutant(key, file, frozenset(_lines(node)), changed)


def keys_of(file: str, source: str) -> Iterator[str]:
    """Of all mutants of a file, whose sources are not written."""
    for key, *_ in _keyed(file, ast.parse(source)):
        yield key


def _keyed(file: str, tree: ast.AST) -> Iterator[tuple[str, ast.AST, object, _Place]]:
    """Each key, what is changed, to what, and where it hangs."""
    seen: Counter[str] = Counter()
    for scope, parent, field, index, node in _places(tree):
        if _is_plain_equality(node) and _is_condition(parent, field):
            continue  # the condition itself is replaced, by True and by False: that says more
        for before, after, new in _changes(node):
            key = f"{file.removeprefix('src/backstash/')}::{scope}: {before} -> {after}"
            seen[key] += 1
            key += f" #{seen[key]}" if seen[key] > 1 else ""
            yield key, node, new, (parent, field, index)


def _put(parent: ast.AST, field: str, index: int | None, new: object) -> None:
    if index is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[index] = new


def _places(
    tree: ast.AST, scope: str = ""
) -> Iterator[tuple[str, ast.AST, str, int | None, ast.AST]]:
    """Every node that may be changed: its function's name, and where it hangs."""
    for field, value in list(ast.iter_fields(tree)):
        if isinstance(tree, ast.keyword) and tree.arg == "strict":
            continue  # zip's, where lengths are equal anyway
        if field in ("annotation", "returns", "bases", "type_params", "decorator_list"):
            continue
        children = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, child in list(children):
            if not isinstance(child, ast.AST) or _is_words(child):
                continue
            inside = scope
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inside = f"{scope}.{child.name}".lstrip(".")
            yield inside, tree, field, index, child
            yield from _places(child, inside)


def _is_plain_equality(node: ast.AST) -> bool:
    orders = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    return (
        isinstance(node, ast.Compare) and len(node.ops) == 1 and not isinstance(node.ops[0], orders)
    )


def _is_condition(parent: ast.AST, field: str) -> bool:
    return field == "test" or isinstance(parent, ast.BoolOp)


def _is_words(node: ast.AST) -> bool:
    """What is for people or for the type checker, and for nothing that runs."""
    match node:
        case (
            ast.Expr(value=ast.Constant())
            | ast.Assert()
            | ast.JoinedStr()
            | ast.Import()
            | ast.ImportFrom()
        ):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id="__slots__" | "__all__")]):
            return True
    return False


def _lines(node: ast.AST) -> range:
    """A statement's own first line; for what is inside one, all of the expression's."""
    if isinstance(
        node, (ast.ExceptHandler, ast.If, ast.While, ast.With, ast.For, ast.Try, *_FUNCTIONS)
    ):
        first = node.body if isinstance(node, (ast.Lambda, ast.Try)) else node
        first = first[0] if isinstance(first, list) else first
        return range(first.lineno, first.lineno + 1)
    return range(node.lineno, node.end_lineno + 1)


def _changes(node: ast.AST) -> Iterator[tuple[str, str, object]]:
    """The code before, the code after, and the node that stands for it."""
    for new in (*_expressions(node), *_statements(node)):
        yield _short(node), _short(new), new


def _short(node: object) -> str:
    """The first line of its code, without its body."""
    if isinstance(node, list):
        return "its body"
    return ast.unparse(node).split("\n")[0] if isinstance(node, ast.AST) else str(node)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=ops):
            if len(ops) > 1:
                yield _with(node, ops=ops[:-1], comparators=node.comparators[:-1])
                yield _with(
                    node, left=node.comparators[0], ops=ops[1:], comparators=node.comparators[1:]
                )
            for at, op in enumerate(ops):
                yield _with(node, ops=[*ops[:at], _COMPARISONS[type(op)](), *ops[at + 1 :]])
        case ast.BoolOp(values=values):
            for at in range(len(values)):
                rest = [*values[:at], *values[at + 1 :]]
                yield _with(node, values=rest) if len(rest) > 1 else rest[0]
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield node.operand
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
            yield _with(node, op=_ARITHMETIC[type(op)]())
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int()):
            yield ast.Constant(node.value + 1)
        case ast.IfExp():
            yield from (node.body, node.orelse)
        case ast.Call(func=ast.Name(id="max" | "min")):
            other = "min" if node.func.id == "max" else "max"
            yield _with(node, func=ast.Name(other, ast.Load()))
        case ast.Call(func=ast.Name(id="all" | "any")):
            other = "any" if node.func.id == "all" else "all"
            yield _with(node, func=ast.Name(other, ast.Load()))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.If() | ast.While():
            if not isinstance(node.test, ast.Constant):
                yield _with(node, test=ast.Constant(False))
                if isinstance(node, ast.If):
                    yield _with(node, test=ast.Constant(True))
        case ast.Return(value=value) if value is not None:
            if not isinstance(value, ast.Constant):
                yield ast.Return(ast.Constant(None))
            elif value.value == "":
                yield ast.Return(ast.Constant("mutant"))
        case ast.AugAssign(op=op):
            yield ast.Pass()
            if type(op) in _ARITHMETIC:
                yield _with(node, op=_ARITHMETIC[type(op)]())
        case ast.Assign(targets=[target]) if isinstance(target, _TARGETS):
            yield ast.Pass()
        case ast.Expr() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break() | ast.Return():
            yield ast.Pass()
        case ast.With(items=[ast.withitem(optional_vars=None)]):
            yield ast.If(ast.Constant(True), node.body, [])
        case ast.ExceptHandler():
            yield _with(node, type=ast.Tuple([], ast.Load()))
        case ast.Try() if node.finalbody:
            yield _with(node, finalbody=[ast.Pass()])
        case ast.FunctionDef(decorator_list=[_, *_]):
            names = {ast.unparse(each) for each in node.decorator_list}
            if not names & {"property", "abstractmethod", "staticmethod", "classmethod"}:
                yield _with(node, decorator_list=[])
