"""The parts of a script that say what is trained, on which data, and by which loop and optimizer."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import torch

from gradcheck_suite.catalogue import loss_definition
from gradcheck_suite.catalogue.build import needs_batch
from gradcheck_suite.execution.batches import Items, leaves, map_leaves
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.optimizers import OPTIMIZERS, NoOpOptimizer, in_groups
from gradcheck_suite.report.scripts.copied_source import CopiedSource
from gradcheck_suite.report.scripts.model_code import model_text
from gradcheck_suite.report.scripts.runtime import load
from gradcheck_suite.report.scripts.tensor_literals import table, tensor_text, values
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Loop, Problem
from gradcheck_suite.trainers import TRAINERS


def is_imported(name: str) -> bool:
    """Return whether a loop or a problem of this name, as the command line takes it, is imported from its place."""
    return ":" in name or name in TRAINERS


def loop_text(loop: Loop, name: str, sources: CopiedSource) -> str:
    """Return `load_loop`: it imports the user's loop from its place, or returns one of the suite's, printed in full."""
    if is_imported(name):
        loaded = _loaded(TRAINERS[name].place if name in TRAINERS else name, sources)
    else:
        loaded = _expression(loop, sources)
    return _function("load_loop()", "Return the loop under test.", f"return {loaded}")


def _loaded(name: str, sources: CopiedSource) -> str:
    """Return the call that loads what `FILE.py:NAME` or `package.module:NAME` stands for."""
    sources.copy(load)
    place, _, attribute = name.rpartition(":")
    folder = Path.cwd()
    if place.endswith(".py"):
        folder, place = Path(place).resolve().parent, Path(place).name
    return f"load({place!r}, {attribute!r}, folder={folder.as_posix()!r})".replace("'", '"')


def _expression(loop: Loop, sources: CopiedSource) -> str:
    """Return the expression of one of the suite's loops: its name, or the call of the function that makes it."""
    maker, _, inner = loop.__qualname__.partition(".<locals>.")
    sources.add(loop.__module__, maker)
    if not inner:
        return maker
    closed_over = inspect.getclosurevars(loop).nonlocals
    arguments = []
    for name in inspect.signature(inspect.getmodule(loop).__dict__[maker]).parameters:
        value = closed_over[name]
        if callable(value):
            sources.copy(value)
        arguments.append(f"{name}={value.__name__ if callable(value) else repr(value)}")
    return f"{maker}({', '.join(arguments)})"


def optimizer_text(case: Case, sources: CopiedSource) -> str:
    """Return `make_optimizer`: the case's real optimizer, or the one whose step changes nothing."""
    if case.optimizer is None:
        sources.copy(NoOpOptimizer)
        call = "NoOpOptimizer(parameters)"
    else:
        factory = OPTIMIZERS[case.optimizer]
        for own in inspect.getclosurevars(factory).globals.values():
            if isinstance(own, type):  # `torch` is a module
                sources.copy(own)
        line = inspect.getsource(factory).strip()
        call = re.sub(r"\bp\b", "parameters", line.partition("lambda p: ")[2].rstrip(","))
    if case.groups > 1:
        sources.copy(in_groups)
        call = f"in_groups({call}, {case.groups})"
    return _function("make_optimizer(parameters)", "Return the optimizer.", f"return {call}")


def generated_text(instance: Instance, sources: CopiedSource) -> str:
    """Return `Model`, `make_model`, `loss` and `count` of a generated problem, in ordinary torch."""
    spec = instance.case.spec
    assert spec is not None
    model, loss = instance.model(), loss_definition(spec.loss)
    sources.copy(loss.torch_loss, loss.count)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    make = [
        "model = Model().to(DEVICE, DTYPE)",
        "model.load_state_dict({name: torch.tensor(v, dtype=torch.float64) for name, v in PARAMETERS.items()})",
        *(f'model.get_parameter("{name}").requires_grad_(False)' for name in frozen),
        "return model.train()",
    ]
    output = "model(batch)" if needs_batch(spec) else 'model(batch["x"])'
    objective = f'return {loss.torch_loss.__name__}(LOSS_OPTIONS, {output}, batch, "{spec.loss.reduction}")'
    parts = [
        model_text(spec, model, sources),
        table("PARAMETERS", {name: values(tensor) for name, tensor in model.state_dict().items()}),
        _function("make_model()", "Return the model as it is before the first step.", "\n".join(make)),
        f"LOSS_OPTIONS = {dict(spec.loss.o)!r}".replace("'", '"'),
        _function("loss(model, batch)", f"Return the loss of a batch, its items' {spec.loss.reduction}.", objective),
        _count_text(f"{loss.count.__name__}(LOSS_OPTIONS, batch)", instance),
    ]
    return "\n\n\n".join(parts)


def problem_text(problem: Problem, instance: Instance, sources: CopiedSource) -> str:
    """Return `make_model`, `loss` and `count` of a user's problem, which is imported from its place."""
    name = instance.case.problem_name
    assert name is not None
    make = f"return PROBLEM.model({instance.case.seed}).to(DEVICE, DTYPE).train()"
    counted = "torch.as_tensor(PROBLEM.count(batch))"
    if problem.count is None:
        sources.copy(leaves)
        counted = "torch.tensor(len(next(leaves(batch))))"
    parts = [
        f"FOUND = {_loaded(name, sources)}\nPROBLEM = FOUND() if callable(FOUND) else FOUND",
        _function("make_model()", "Return the model as it is before the first step.", make),
        _function("loss(model, batch)", "Return the loss of a batch.", "return PROBLEM.loss(model, batch)"),
        _count_text(counted, instance),
    ]
    return "\n\n\n".join(parts)


def _count_text(counted: str, instance: Instance) -> str:
    dtype = torch.promote_types(torch.float32, instance.dtype)
    what = "Return what the mean over a batch divides by."
    return _function("count(batch)", what, f"return {counted}.to(DEVICE, {dtype})")


def _function(signature: str, what: str, body: str) -> str:
    return f'def {signature}:\n    """{what}"""\n{textwrap.indent(body, "    ")}'


def data_text(instance: Instance, sources: CopiedSource) -> str:
    """Return `DATA`, the items of one epoch, and `MICRO_BATCHES`, the items of each micro-batch."""
    case, plan = instance.case, instance.case.plan
    sources.copy(Items)
    if case.spec is not None:
        lines = [f'    "{name}": {tensor_text(tensor, 4)},' for name, tensor in instance.data.items()]
        data = "\n".join(["DATA = {", *lines, "}"])
    else:
        sources.copy(map_leaves)
        moved = "t.to(DEVICE, DTYPE) if t.is_floating_point() else t.to(DEVICE)"
        data = f"DATA = map_leaves(lambda t: {moved}, PROBLEM.batch({plan.total_items}, {case.seed}))"
    cuts = ", ".join(str(plan.items(j)) for j in range(len(plan.micro_batches)))
    chosen = _function(
        "batch_of(items)", "Return some of the items as one batch.", "return Items(DATA).__getitems__(items)"
    )
    return f"{data}\nMICRO_BATCHES = [{cuts}]\n\n\n{chosen}"
