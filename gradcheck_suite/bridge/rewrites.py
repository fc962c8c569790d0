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
BRANCHES = """\
# both branches are computed; the gradient follows the one whose condition holds
chosen = torch.where({condition}, value_if_true, value_if_false)"""
NUMBER = """\
# the number is data: compute it where the batch is drawn, and read it as a tensor in the loss
def batch(items, seed):
    drawn = draw(items, seed)
    return {**drawn, "number": number_of(drawn)}"""


class _Where(ast.NodeTransformer):
    """Turns `a if condition else b` into `torch.where(condition, a, b)`."""

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        where = ast.Attribute(ast.Name("torch", ast.Load()), "where", ast.Load())
        return ast.Call(where, [node.test, node.body, node.orelse], [])


def rewrite_of(line: str, *, foreign: bool) -> str:
    """Return lines of Python that take no decision on data, in place of a line that does.

    Args:
        line: the source line of the decision.
        foreign: whether the line is another file's than the loss's, such as a library's.
    """
    if "expert" in line:
        return EXPERTS
    if foreign:
        return LOSS
    if line.startswith(("for ", "while ")):
        return LOOP
    if line.startswith(("if ", "elif ", "assert ")):
        return BRANCHES.format(condition=line.removesuffix(":").partition(" ")[2])
    try:
        tree = ast.parse(line)
    except SyntaxError:
        return NUMBER
    if any(isinstance(node, ast.IfExp) for node in ast.walk(tree)):
        return ast.unparse(ast.fix_missing_locations(_Where().visit(tree)))
    return NUMBER
