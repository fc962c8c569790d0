"""The lines that help where a loss takes a Python decision on the values of tensors, which `torch.export` refuses."""

from __future__ import annotations

import ast

LOSS = """\
def loss(model, batch):
    # without the labels, the model takes no decision on them
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), ignore_index=-100)"""
EXPERTS = """\
# every expert's share in products of matrices, without a loop over the experts that are hit
model.set_experts_implementation("batched_mm")"""
LOOP = """\
# every part for all rows; rows that do not belong to it have weight 0
for number, part in enumerate(parts):
    belongs = (choice == number).unsqueeze(-1)
    out = out + torch.where(belongs, part(x), 0)"""
ROUNDS = """\
# as many rounds as can occur; a round too many changes nothing
for number in range(most):
    x = torch.where({condition}, one_round(x), x)"""
BRANCHES = """\
# both branches are computed; the gradient follows the one whose condition holds
chosen = torch.where({condition}, value_if_true, value_if_false)"""
ASSERTION = "# an assertion has no gradient: leave it out of the loss, and check the condition where the batch is drawn"
NUMBER = """\
# the number is data: compute it where the batch is drawn, and read it as a tensor in the loss
def batch(items, seed):
    drawn = draw(items, seed)
    return {**drawn, "number": number_of(drawn)}"""
COPY = """\
# in a copy of {name}, which `{name} = copy` puts in its place:
{lines}"""


class _Tensors(ast.NodeTransformer):
    """Turns what decides on a value into what computes with it: `a if c else b`, `and`, `or`, `not`, `float`."""

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        return _call("where", node.test, node.body, node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        return _joined(node.values, ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr())

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return _call("logical_not", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        pairs = zip(sides, node.ops, sides[1:], strict=False)
        return _joined([ast.Compare(left, [op], [right]) for left, op, right in pairs], ast.BitAnd())

    def visit_Slice(self, node: ast.Slice) -> ast.expr:
        return node  # a length must be a number

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Name("float"), [number]) | ast.Call(ast.Attribute(number, "item"), []):
                return ast.Call(ast.Attribute(number, "detach", ast.Load()), [], [])
        return node


def _call(function: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Attribute(ast.Name("torch", ast.Load()), function, ast.Load()), list(arguments), [])


def _joined(parts: list[ast.expr], operator: ast.operator) -> ast.expr:
    joined = parts[0]
    for part in parts[1:]:
        joined = ast.BinOp(joined, operator, part)
    return joined


def _computed(code: str) -> str:
    return ast.unparse(ast.fix_missing_locations(_Tensors().visit(ast.parse(code))))


def rewrite_of(line: str) -> str:
    """Return lines of Python that take no decision on data, in place of a line that does."""
    try:
        # a header needs a body, and `elif` would need an `if`
        (statement,) = ast.parse(f"{line.removeprefix('el')} pass" if line.endswith(":") else line).body
    except (SyntaxError, ValueError):
        return NUMBER
    match statement:
        case ast.For(iter=ast.Call(ast.Name("range"), [*_, end])):
            return ROUNDS.format(condition=f"number < {ast.unparse(end)}")
        case ast.For():
            return LOOP
        case ast.While(test):
            return ROUNDS.format(condition=_computed(ast.unparse(test)))
        case ast.If(test):
            return BRANCHES.format(condition=_computed(ast.unparse(test)))
        case ast.Assert():
            return ASSERTION
    computed = _computed(line)
    return NUMBER if computed == ast.unparse(ast.parse(line)) else computed


def in_a_copy_of(name: str, lines: str) -> str:
    """Return the lines with a first one that says to put them into a copy of a library's function."""
    return COPY.format(name=name, lines=lines)
