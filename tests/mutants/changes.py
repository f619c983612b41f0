"""The small changes that one can make to a source, each at one place.

Left alone is what no test has to hold: text for people (docstrings, strings, log calls, `__repr__`,
`__str__`), types, decorators, assertions, `zip(strict=...)`, and numbers that have a module's name
for themselves, which are tuned.  So is what fails whenever the module or the object is made:
assignments in `__init__`, sums of strings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

COMPARISONS: Final[Mapping[type[ast.cmpop], tuple[str, tuple[str, ...]]]] = {
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
}
ARITHMETIC: Final[Mapping[type[ast.operator], tuple[str, str]]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
}
# What a function returns instead, by its annotation.
RETURNED: Final = {
    "bool": ("True", "False"),
    "int": ("0",),
    "float": ("0.0",),
    "str": ('""',),
    "bytes": ('b""',),
}
TEXT_FOR_PEOPLE: Final = ("__repr__", "__str__")
LOG_CALL: Final = re.compile(r"(^|[._])log(ger)?\.\w+$", re.IGNORECASE)
# Swapped, their arguments raise TypeError or say the same.
NOT_SWAPPED: Final = (
    "isinstance",
    "issubclass",
    "cast",
    "getattr",
    "setattr",
    "hasattr",
    "TypeVar",
    "min",
    "max",
)
INITIALIZERS: Final = ("__init__", "__post_init__")

Functions = ast.FunctionDef | ast.AsyncFunctionDef


class Change(NamedTuple):
    """One change: `text` instead of the bytes [start, end) of a source, which begin in `line`."""

    kind: str
    line: int
    start: int
    end: int
    text: str

    def made_in(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def members_of_enums(sources: Iterable[bytes]) -> dict[str, list[str]]:
    """Return the members of every enum that the sources define, by its name."""
    found: dict[str, list[str]] = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and any(
                isinstance(base, ast.Name) and base.id.endswith(("Enum", "Flag"))
                for base in node.bases
            ):
                targets = [it.targets[0] for it in node.body if isinstance(it, ast.Assign)]
                found[node.name] = [it.id for it in targets if isinstance(it, ast.Name)]
    return found


def changes(source: bytes, enums: Mapping[str, Sequence[str]] | None = None) -> list[Change]:
    """Return every change that can be made to a source, in its order."""
    return sorted(_Finder(source, enums or {}).found, key=lambda it: (it.start, it.end, it.text))


class _Finder(ast.NodeVisitor):
    """Finds changes.  Positions are those of ast: lines from 1, columns in bytes."""

    def __init__(self, source: bytes, enums: Mapping[str, Sequence[str]]) -> None:
        self.found: list[Change] = []
        self._source, self._enums = source, enums
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._functions: list[Functions] = []
        self.visit(ast.parse(source))

    # What is left alone.

    def visit_FunctionDef(self, node: Functions) -> None:
        if node.name in TEXT_FOR_PEOPLE or all(map(_says_nothing, node.body)):
            return
        self.visit(node.args)
        self._functions.append(node)
        for statement in node.body:
            self.visit(statement)
        self._functions.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_arg(self, node: ast.arg) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assigned(node, [node.target], node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assigned(node, node.targets, node.value)

    def _assigned(self, node: ast.stmt, targets: list[ast.expr], value: ast.expr) -> None:
        if isinstance(targets[0], ast.Name) and targets[0].id.isupper() and _is_number(value):
            return
        name = self._functions[-1].name if self._functions else ""
        if isinstance(targets[0], ast.Attribute | ast.Subscript) and name not in INITIALIZERS:
            self._drop(node)
        for each in (*targets, value):
            self.visit(each)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._turn_round(node.test)
            self.generic_visit(node)

    # What is changed.

    def visit_While(self, node: ast.While) -> None:
        self._turn_round(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._turn_round(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._turn_round(test)
        self.generic_visit(node)

    def visit_match_case(self, node: ast.match_case) -> None:
        if node.guard is not None:
            self._turn_round(node.guard)
        self.generic_visit(node)

    def _turn_round(self, test: ast.expr) -> None:
        """Negate a condition that has no operator of its own to change."""
        if not isinstance(test, ast.Compare | ast.BoolOp | ast.Constant | ast.UnaryOp):
            start, end = self._span(test)
            text = self._source[start:end].decode()
            self._add("condition turned round", test, start, end, f"not ({text})")

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value
        if isinstance(value, ast.Constant) or _is_log_call(value):
            return
        if isinstance(value, ast.Call | ast.Await):
            self._drop(node)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._drop(node)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._drop(node)

    def _drop(self, node: ast.stmt) -> None:
        self._add("statement dropped", node, *self._span(node), "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None or isinstance(node.value, ast.Constant):
            self.generic_visit(node)
            return
        returns = self._functions[-1].returns
        kind = ast.unparse(returns) if returns is not None else ""
        for text in RETURNED.get(kind, ("None",)):
            self._add("returned", node.value, *self._span(node.value), text)
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
            token, others = COMPARISONS[type(op)]
            self._replace("comparison", token, others, left, right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        token, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._replace("and, or", token, (other,), left, right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, _ = self._span(node)
            self._add("not dropped", node, start, start + len("not "), "")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC and not {*map(type, (node.left, node.right))} & _NO_NUMBERS:
            if not (isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)):
                token, other = ARITHMETIC[type(node.op)]
                self._replace("arithmetic", token, (other,), node.left, node.right)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("True, False", node, *self._span(node), str(not node.value))
        elif isinstance(node.value, int):
            for number in {node.value + 1, max(node.value - 1, 0)} - {node.value}:
                self._add("number", node, *self._span(node), str(number))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        members = self._enums.get(node.value.id, ()) if isinstance(node.value, ast.Name) else ()
        if node.attr in members and len(members) > 1:
            other = members[(members.index(node.attr) + 1) % len(members)]
            start, end = self._span(node)
            self._add("member", node, start, end, f"{ast.unparse(node.value)}.{other}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _is_log_call(node):
            return
        two = node.args[:2]
        if (
            len(two) == 2
            and not any(isinstance(each, ast.Starred) for each in two)
            and ast.unparse(node.func) not in NOT_SWAPPED
            and ast.dump(two[0]) != ast.dump(two[1])
        ):
            (start, middle), (middle_end, end) = map(self._span, two)
            source = self._source
            text = source[middle_end:end] + source[middle:middle_end] + source[start:middle]
            self._add("arguments swapped", two[0], start, end, text.decode())
        for each in (node.func, *node.args, *node.keywords):
            if not (isinstance(each, ast.keyword) and each.arg == "strict"):
                self.visit(each)

    def _replace(
        self, kind: str, token: str, others: Iterable[str], left: ast.expr, right: ast.expr
    ) -> None:
        """Replace the operator that stands between two operands."""
        (_, start), (end, _) = self._span(left), self._span(right)
        between = self._source[start:end]
        if b"#" in between:
            return
        at = start + between.index(token.encode())
        for other in others:
            self._add(kind, left, at, at + len(token), other, left.end_lineno)

    def _add(
        self,
        kind: str,
        node: ast.expr | ast.stmt,
        start: int,
        end: int,
        text: str,
        line: int | None = None,
    ) -> None:
        self.found.append(Change(kind, line or node.lineno, start, end, text))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._lines[node.lineno - 1] + node.col_offset,
            self._lines[node.end_lineno - 1] + node.end_col_offset,
        )


_NUMERIC: Final = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Tuple, ast.expr_context)
_NO_NUMBERS: Final = {ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp}


def _is_number(value: ast.expr) -> bool:
    """Whether a value is numbers only, and names of such."""
    return all(
        isinstance(node, _NUMERIC)
        or (isinstance(node, ast.Constant) and isinstance(node.value, int | float))
        or (isinstance(node, ast.Name) and node.id.isupper())
        for node in ast.walk(value)
    )


def _says_nothing(statement: ast.stmt) -> bool:
    """Whether it is a docstring, `...` or `pass`: protocols have nothing else."""
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _is_log_call(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and bool(LOG_CALL.search(ast.unparse(value.func)))
