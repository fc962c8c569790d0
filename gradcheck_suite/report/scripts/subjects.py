"""The parts of a script that say what is trained and by which loop."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import torch

from gradcheck_suite.catalogue import loss_definition, output_signal
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.optimizers import OPTIMIZERS
from gradcheck_suite.report.scripts.literals import table, tensor_text, values
from gradcheck_suite.report.scripts.losses import Known, body_text
from gradcheck_suite.report.scripts.models import model_text
from gradcheck_suite.report.scripts.sources import Sources
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Loop, Problem
from gradcheck_suite.schema.spec import ProblemSpec
from gradcheck_suite.trainers import TRAINERS

CARRIED = "gradcheck_suite.report.scripts.carried"


def is_imported(name: str) -> bool:
    """Return whether a loop or a problem of this name, as the command line takes it, is imported from its place."""
    return ":" in name or name in TRAINERS


def loop_text(loop: Loop, name: str, sources: Sources) -> str:
    """Return `load_loop`: it imports the user's loop from its place, or returns one of the suite's, printed in full."""
    if is_imported(name):
        place = TRAINERS[name].place if name in TRAINERS else name
        return _named("load_loop", "the loop under test", "LOOP", place, sources)
    return f'def load_loop():\n    """Return the loop under test."""\n    return {_expression(loop, sources)}'


def _named(function: str, what: str, constant: str, name: str, sources: Sources) -> str:
    place, _, attribute = name.rpartition(":")
    sources.add(CARRIED, "named")
    is_file = place.endswith(".py")
    shown = Path(place).resolve().as_posix() if is_file else place
    folder = (Path(place).resolve().parent if is_file else Path.cwd()).as_posix()
    return (
        f"{constant} = {shown!r}\n{constant}_FOLDER = {folder!r}\n\n\n"
        f'def {function}():\n    """Return {what}."""\n    return named({constant}, {attribute!r}, {constant}_FOLDER)'
    ).replace("'", '"')


def _expression(loop: Loop, sources: Sources) -> str:
    """Return how one of the suite's own loops is made: its name, or the call of the function that returns it."""
    maker, _, inner = loop.__qualname__.partition(".<locals>.")
    sources.add(loop.__module__, maker)
    if not inner:
        return maker
    closed_over = inspect.getclosurevars(loop).nonlocals
    arguments = []
    for name in inspect.signature(inspect.getmodule(loop).__dict__[maker]).parameters:
        value = closed_over[name]
        if callable(value):
            sources.add(value.__module__, value.__name__)
        arguments.append(f"{name}={value.__name__ if callable(value) else repr(value)}")
    return f"{maker}({', '.join(arguments)})"


def optimizer_text(case: Case, sources: Sources) -> str:
    """Return `make_optimizer`: the case's real optimizer, or the one whose step changes nothing."""
    if case.optimizer is None:
        sources.add("gradcheck_suite.execution.optimizers", "HoldStill")
        call = "HoldStill(parameters)"
    else:
        line = inspect.getsource(OPTIMIZERS[case.optimizer]).strip()
        call = re.sub(r"\bp\b", "parameters", line.partition("lambda p: ")[2].rstrip(","))
    return f'def make_optimizer(parameters):\n    """Return the optimizer."""\n    return {call}'


def generated_text(spec: ProblemSpec, instance: Instance, sources: Sources) -> str:
    """Return `Model`, `make_model`, `loss` and `count` of a generated problem, in ordinary torch."""
    model = instance.model()
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    freeze = [f"model.get_parameter({name!r}).requires_grad_(False)".replace("'", '"') for name in frozen]
    make = [
        "model = Model().to(DEVICE, DTYPE)",
        "model.load_state_dict({name: torch.tensor(v, dtype=torch.float64) for name, v in PARAMETERS.items()})",
        *freeze,
        "return model.train()",
    ]
    class_text = model_text(spec, model, sources)
    return "\n\n\n".join(
        [
            class_text,
            table("PARAMETERS", {name: values(tensor) for name, tensor in model.state_dict().items()}),
            _function("make_model()", "Return the model as every run begins with it.", "\n".join(make)),
            *_loss_texts(spec, instance, sources),
        ]
    )


def _loss_texts(spec: ProblemSpec, instance: Instance, sources: Sources) -> list[str]:
    kind, signal = loss_definition(spec.loss), output_signal(spec)
    known = Known(
        spec.loss.o, tuple(instance.data), {"reduction": spec.loss.reduction, "out.ndim": 1 + len(signal.size)}
    )
    loss = "out = model(batch)\n" + body_text(kind.torch_loss, known, sources)
    count = body_text(kind.count, known, sources, convert=f"to({_count_dtype(instance)})")
    return [
        _function("loss(model, batch)", f"Return the loss of a batch, its items' {spec.loss.reduction}.", loss),
        _function("count(batch)", "Return what the mean over a batch divides by.", count),
    ]


def _function(signature: str, what: str, body: str) -> str:
    return f'def {signature}:\n    """{what}"""\n{textwrap.indent(body, "    ")}'


def _count_dtype(instance: Instance) -> torch.dtype:
    return torch.promote_types(torch.float32, instance.dtype)


def data_text(instance: Instance) -> str:
    """Return `MICRO_BATCHES` with its tensors as literals."""
    plan = instance.case.plan
    dtype = "dtype=DTYPE" if instance.case.device == "cpu" else "dtype=DTYPE, device=DEVICE"
    lines = ["MICRO_BATCHES = ["]
    for j in range(len(plan.micro_batches)):
        batch = instance.batch(plan.items(j))
        lines += ["    {", *(f'        "{name}": {tensor_text(t, dtype, 8)},' for name, t in batch.items()), "    },"]
    return "\n".join([*lines, "]"])


def problem_text(name: str, problem: Problem, instance: Instance, sources: Sources) -> str:
    """Return `make_model`, `loss` and `count` of a user's problem, which is imported from its place, and its data."""
    case = instance.case
    plan, dtype = case.plan, _count_dtype(instance)
    sources.add("gradcheck_suite.execution.instance", "map_leaves")
    counted = "torch.as_tensor(PROBLEM.count(batch))"
    if problem.count is None:
        sources.add("gradcheck_suite.execution.instance", "leaves")
        counted = "torch.tensor(len(next(leaves(batch))))"
    parts = ", ".join(f"items({plan.items(j).start}, {plan.items(j).stop})" for j in range(len(plan.micro_batches)))
    to_case = "t.to(DEVICE, DTYPE) if t.is_floating_point() else t.to(DEVICE)"
    return "\n\n\n".join(
        [
            _named("load_problem", "the problem, or a function that returns it", "PROBLEM_FILE", name, sources),
            "PROBLEM = load_problem()\nPROBLEM = PROBLEM() if callable(PROBLEM) else PROBLEM\n"
            f"DATA = map_leaves(lambda t: {to_case}, PROBLEM.batch({plan.total_items}, {case.seed}))",
            _function(
                "make_model()",
                "Return the model as every run begins with it.",
                f"return PROBLEM.model({case.seed}).to(DEVICE, DTYPE).train()",
            ),
            _function("loss(model, batch)", "Return the loss of a batch.", "return PROBLEM.loss(model, batch)"),
            _function(
                "count(batch)",
                "Return what the mean over a batch divides by.",
                f"return {counted}.to(DEVICE, {dtype})",
            ),
            _function(
                "items(start, stop)",
                "Return some of the items as one batch.",
                "return map_leaves(lambda t: t[start:stop], DATA)",
            ),
            f"MICRO_BATCHES = [{parts}]",
        ]
    )
