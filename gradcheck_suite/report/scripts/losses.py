"""A loss and its count as ordinary torch code: the catalogue's functions with the options of one case put in.

The catalogue writes each loss once for all its options. Here those of a case are known, so `options["p"]` becomes its
value, conditions on options are decided and constants take the place of their names; what is left reads as the code
of somebody who wanted this one loss.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradcheck_suite.report.scripts.sources import Sources

WIDTH = 100


@dataclass(frozen=True)
class Known:
    """What is known about a loss in one case.

    Attributes:
        options: of the loss.
        keys: of the batches.
        constants: names in the loss, such as `reduction`, or attributes, such as `out.ndim`, and their values.
    """

    options: Mapping[str, Any]
    keys: Collection[str]
    constants: Mapping[str, Any] = field(default_factory=dict)


def body_text(function: Callable[..., Any], known: Known, sources: Sources, *, convert: str = "") -> str:
    """Return the statements of one of the catalogue's functions, with what is known put in.

    Args:
        function: takes `options` first.
        known: about the case.
        sources: gets what the statements need.
        convert: a method call, such as `to(torch.float64)`, for what is returned.
    """
    body = _Fold(known).block(_tree(function).body)
    if called := _call_of_another(body):
        return body_text(function.__globals__[called], known, sources, convert=convert)
    left = {node.id for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    assert "options" not in left, f"{function.__name__}: an option is used in a way that cannot be put in"
    sources.add_needs(function.__module__, *body)
    if convert:
        *_, last = body
        assert isinstance(last, ast.Return)
        method = ast.parse(f"x.{convert}", mode="eval").body
        assert isinstance(method, ast.Call)
        assert isinstance(method.func, ast.Attribute)
        assert last.value is not None
        method.func.value = last.value
        last.value = method
    text = "\n".join(_lines(ast.fix_missing_locations(statement)) for statement in body)
    return text if '"' in text else text.replace("'", '"')


def _lines(statement: ast.stmt) -> str:
    """Return a statement as text, a long call with one argument a line."""
    text = ast.unparse(statement)
    match statement:
        case ast.Return(ast.Call(function, arguments, keywords)) if len(text) > WIDTH:
            given = [f"    {ast.unparse(argument)}," for argument in (*arguments, *keywords)]
            return "\n".join([f"return {ast.unparse(function)}(", *given, ")"])
    return text


def _tree(function: Callable[..., Any]) -> ast.FunctionDef:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    return tree


def _call_of_another(body: list[ast.stmt]) -> str | None:
    """Return the function that a body hands its options to, where it does nothing else."""
    match body:
        case [ast.Return(ast.Call(ast.Name(called), [ast.Name("options"), *_]))]:
            return called
    return None


class _Fold(ast.NodeTransformer):
    """Puts in what is known, straight down a function that never branches on its data."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._constants = dict(known.constants)

    def block(self, statements: Iterable[ast.stmt]) -> list[ast.stmt]:
        """Return what is left of some statements."""
        return list(self._block(statements))

    def _block(self, statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in statements:
            match statement:
                case ast.Expr(ast.Constant()):
                    continue
                case ast.If(test, body, other):
                    decided = self.visit(test)
                    assert isinstance(decided, ast.Constant), f"cannot decide {ast.unparse(test)}"
                    chosen = self.block(body if decided.value else other)
                    yield from chosen
                    if chosen and isinstance(chosen[-1], ast.Return):
                        return
                case ast.Assign([target], value):
                    yield from self._assign(target, self.visit(value))
                case ast.Return():
                    yield self.visit(statement)
                    return
                case _:
                    yield self.visit(statement)

    def _assign(self, target: ast.expr, value: ast.expr) -> Iterator[ast.stmt]:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=True):
                yield from self._assign(one, its)
            return
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self._constants.pop(node.id, None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            self._constants[target.id] = value.value
        elif ast.unparse(target) != ast.unparse(value):
            yield ast.Assign([target], value)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._constants[node.id]) if node.id in self._constants else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        path = ast.unparse(node)
        return ast.Constant(self._constants[path]) if path in self._constants else self._inside(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        match node:
            case ast.Subscript(ast.Name("options"), ast.Constant(str(name))):
                return ast.Constant(self._known.options[name])
        return self._inside(node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        match node:
            case ast.Call(ast.Attribute(ast.Name("options"), "get"), [ast.Constant(str(name))]):
                return ast.Constant(self._known.options.get(name))
            case ast.Call(ast.Attribute(ast.Name("batch"), "get"), [ast.Constant(str(name))]):
                there = name in self._known.keys
                return ast.Subscript(ast.Name("batch"), ast.Constant(name)) if there else ast.Constant(None)
        call = self._inside(node)
        # every None that the catalogue passes by keyword is torch's default
        call.keywords = [k for k in call.keywords if not (isinstance(k.value, ast.Constant) and k.value.value is None)]
        return call

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        test = self.visit(node.test)
        if isinstance(test, ast.Constant):
            return self.visit(node.body if test.value else node.orelse)
        return ast.IfExp(test, self.visit(node.body), self.visit(node.orelse))

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        node = self._inside(node)
        match node:
            case ast.Compare(ast.Constant(left), [ast.Eq()], [ast.Constant(right)]):
                return ast.Constant(left == right)
            case ast.Compare(ast.Constant(left), [ast.NotEq()], [ast.Constant(right)]):
                return ast.Constant(left != right)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        node = self._inside(node)
        match node:
            case ast.UnaryOp(ast.Not(), ast.Constant(value)):
                return ast.Constant(not value)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        node = self._inside(node)
        if all(isinstance(value, ast.Constant) for value in node.values):
            decide = all if isinstance(node.op, ast.And) else any
            return ast.Constant(decide(value.value for value in node.values if isinstance(value, ast.Constant)))
        return node

    def _inside(self, node: Any) -> Any:
        return self.generic_visit(node)
