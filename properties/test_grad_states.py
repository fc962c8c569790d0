"""`.grad` as a state machine: whatever touches it in any order, and the planted faults of torch that the machine finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch.utils.hooks import RemovableHandle

from gradcheck_suite import stateful
from gradcheck_suite.stateful import GradStates
from properties.devices import DEVICES
from properties.helpers import scaled


def run(machine: Callable[[], GradStates] = GradStates, **options: Any) -> None:
    """Run a machine for the examples of the profile; once it fails, that is enough."""
    only = {"phases": [Phase.generate], "report_multiple_bugs": False, "print_blob": False}
    run_state_machine_as_test(machine, settings=settings(**only | options))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_what_the_model_says_after_anything(device):
    run(lambda: GradStates(device=device), phases=list(Phase))


@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "RMSprop", "NAdam"])
def test_steps_do_not_depend_on_who_else_holds_a_gradient(name):
    run(lambda: GradStates(optimizer=getattr(torch.optim, name)), max_examples=scaled(10).max_examples)


# --- planted faults of torch: what the machine says, the function that is replaced, and the new one, given the real one

Optimizer, Module, Tensor, SGD = torch.optim.Optimizer, torch.nn.Module, torch.Tensor, torch.optim.SGD
SAME, REFERENCE, NONE = "the same tensor as before", "a reference taken on the way", "grad is .*should be None"
NO_GRAPH, GRAPH, VALUE, PARAMETER = "have no graph", "have a graph", r"\.grad is \[.*should be", "parameter . is"
IS_NONE = r"grad is None, should be \["
BUFFER = torch.zeros(2)


def leaves(roots: Any) -> list[torch.Tensor]:
    """Return the leaves that a backward reaches."""
    todo, seen = [root.grad_fn for root in ([roots] if isinstance(roots, Tensor) else roots)], []
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.append(node)
            todo += [following for following, _ in node.next_functions]
    return [node.variable for node in seen if hasattr(node, "variable")]


def accumulating(change: Callable[[torch.Tensor, Any, bool], None]) -> Callable[..., None]:
    """Return a faulty backward: `change(leaf, a copy of its gradient before or None, create_graph)` comes after it."""

    def backward(real: Any, tensors: Any, *args: Any, **options: Any) -> None:
        before = [(leaf, None if leaf.grad is None else leaf.grad.detach().clone()) for leaf in leaves(tensors)]
        real(tensors, *args, **options)
        for leaf, gradient in before:
            if leaf.grad is not None:
                change(leaf, gradient)

    return backward


def assign(owner: Any, name: str, value: Any) -> None:
    """Assign, in a lambda."""
    setattr(owner, name, value)


def then(*does: Any) -> Any:
    """Return what the first of several expressions is."""
    return does[0]


def of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients that an optimizer has."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def accessor(name: str, **new: Callable[..., Any]) -> property:
    """Return torch's property with another getter, setter or deleter."""
    real = getattr(torch._C.TensorBase, name)
    parts = {"fget": real.__get__, "fset": real.__set__, "fdel": real.__delete__}
    return property(**parts | {part: lambda *args, _=change: _(real, *args) for part, change in new.items()})


FAULTS: dict[str, tuple[str, Any, str, Any]] = {
    # accumulation
    "accumulation makes a new tensor": (
        SAME, torch.autograd, "backward", accumulating(lambda leaf, _: assign(leaf, "grad", leaf.grad.clone()))
    ),
    "accumulation overwrites": (
        VALUE, torch.autograd, "backward",
        accumulating(lambda leaf, before: None if before is None else leaf.grad.data.sub_(before)),
    ),
    "accumulation keeps a buffer that others hold": (
        f"{VALUE}|{SAME}|should be a new", torch.autograd, "backward",
        accumulating(lambda leaf, before: assign(leaf, "grad", BUFFER.copy_(leaf.grad)) if before is None and leaf.dtype == BUFFER.dtype else None),
    ),
    "create_graph is ignored": (
        GRAPH, torch.autograd, "backward", lambda real, *args, create_graph=False, **options: real(*args, **options),
    ),
    "the second root is forgotten": (
        VALUE, torch.autograd, "backward", lambda real, roots, *args, **options: real(roots if isinstance(roots, Tensor) else roots[:1], *args, **options),
    ),
    "inputs are ignored": (
        f"{VALUE}|{NONE}", torch.autograd, "backward", lambda real, *args, inputs=None, **options: real(*args, **options),
    ),
    "a checkpoint adds twice": (VALUE, stateful, "checkpoint", lambda real, *args, **options: 2 * real(*args, **options)),
    "no_grad records": (
        "backward of a loss under no_grad should raise", torch.no_grad, "__enter__",
        lambda real, self: assign(self, "prev", torch.is_grad_enabled()),
    ),
    "autograd.grad accumulates": (
        f"{VALUE}|{NONE}", torch.autograd, "grad", lambda real, loss, *args, **options: then(real(loss, *args, **options | {"retain_graph": True}), loss.backward()),
    ),
    "functional_call reads the module": (
        "functional_call puts in place", torch.func, "functional_call", lambda real, module, _, args: module(*args)
    ),
    # resets
    "zero_ takes new memory": (REFERENCE, Tensor, "zero_", lambda real, self: then(self, assign(self, "data", torch.zeros_like(self)))),
    "zero_grad(True) leaves zeros": (NONE, Optimizer, "zero_grad", lambda real, self, set_to_none=True: real(self, set_to_none=False)),
    "zero_grad(False) leaves None": (IS_NONE, Optimizer, "zero_grad", lambda real, self, set_to_none=True: real(self)),
    "zero_grad(False) assigns zeros": (
        SAME, Module, "zero_grad", lambda real, self, set_to_none=True: real(self) if set_to_none else [assign(p, "grad", torch.zeros_like(p)) for p in self.parameters() if p.grad is not None],
    ),
    "zero_grad(False) keeps the graph": (
        NO_GRAPH, Optimizer, "zero_grad", lambda real, self, set_to_none=True: real(self) if set_to_none else [g.data.zero_() for g in of(self)],
    ),
    "foreach forgets the last gradient": (VALUE, torch, "_foreach_zero_", lambda real, tensors: real(tensors[:-1]) if len(tensors) > 1 else None),
    # by hand
    "= None leaves zeros": (NONE, Tensor, "grad", accessor("grad", fset=lambda real, self, new: real.__set__(self, new) if new is not None or self.grad is None else self.grad.zero_())),
    "del leaves zeros": (NONE, Tensor, "grad", accessor("grad", fdel=lambda real, self: self.grad is not None and self.grad.zero_())),
    "= copies": (f"{SAME}|{VALUE}", Tensor, "grad", accessor("grad", fset=lambda real, self, new: real.__set__(self, None if new is None else new.clone()))),
    "clone shares memory": (REFERENCE + "|" + VALUE, Tensor, "clone", lambda real, self: self.view_as(self)),
    "detach_ keeps the graph": (NO_GRAPH, Tensor, "detach_", lambda real, self: self),
    "mul_ takes new memory": (REFERENCE, Tensor, "mul_", lambda real, self, by: then(self, assign(self, "data", self.data * by))),
    "clipping assigns": (
        SAME, torch.nn.utils, "clip_grad_norm_",
        lambda real, parameters, *args, **options: [assign(p, "grad", p.grad.clone()) for p in then(kept := list(parameters), real(kept, *args, **options)) if p.grad is not None],
    ),
    "clipping takes each norm by itself": (
        VALUE, torch.nn.utils, "clip_grad_norm_", lambda real, parameters, *args, **options: [real([p], *args, **options) for p in parameters],
    ),
    # hooks
    "a hook fires twice": (VALUE, Tensor, "register_hook", lambda real, self, hook: real(self, lambda g: hook(hook(g)))),
    "a removed hook fires": (f"{VALUE}|{NONE}|{IS_NONE}|{PARAMETER}", RemovableHandle, "remove", lambda real, self: None),
    "a hook after accumulation fires twice": (
        "was called", Tensor, "register_post_accumulate_grad_hook",
        lambda real, self, hook: real(self, lambda p: [hook(p) for _ in range(2) if p.grad is not None] and None),
    ),
    "a hook after accumulation is lost": (
        f"was called 0 times|{NONE}", Tensor, "register_post_accumulate_grad_hook", lambda real, self, hook: real(self, lambda p: None)
    ),
    # steps
    "a step writes its weight decay into .grad": (VALUE, SGD, "step", lambda real, self, *args: then(real(self, *args), [g.add_(1) for g in of(self)])),
    "a step frees .grad": (IS_NONE, SGD, "step", lambda real, self, *args: then(real(self, *args), [assign(p, "grad", None) for p in self.param_groups[0]["params"]])),
    "a step takes a closure's gradient from before": (f"{VALUE}|{NONE}|{IS_NONE}", SGD, "step", lambda real, self, *args: real(self)),
    "a step forgets the last parameter": (PARAMETER, torch, "_foreach_add_", lambda real, a, b, **options: real(a[:-1], b[:-1], **options) if len(a) > 1 else None),
    "a fused step has another rate": (PARAMETER, torch, "_fused_sgd_", lambda real, *args, lr, **options: real(*args, lr=2 * lr, **options)),
    # modules
    "load_state_dict resets .grad": (IS_NONE, Module, "load_state_dict", lambda real, self, *args: then(real(self, *args), self.zero_grad())),
    "an optimizer's load_state_dict resets .grad": (IS_NONE, Optimizer, "load_state_dict", lambda real, self, *args: then(real(self, *args), self.zero_grad())),
    "requires_grad_ drops .grad": (IS_NONE, Tensor, "requires_grad_", lambda real, self, flag=True: assign(self, "grad", None) if not flag and self.is_leaf and self.requires_grad and real(self, flag) is self else real(self, flag)),
    ".data = drops .grad": (IS_NONE, Tensor, "data", accessor("data", fset=lambda real, self, new: then(real.__set__(self, new), assign(self, "grad", None)))),
    "to drops .grad": (IS_NONE, Module, "to", lambda real, self, *args: then(real(self, *args), self.zero_grad())),
    "to leaves .grad in its dtype": (r"grad is torch\.float|same tensor", Module, "to", lambda real, self, *args: then(kept := [(p, p.grad) for p in self.parameters()], self.zero_grad(), real(self, *args), [assign(p, "grad", None if g is None else g.to(args[0]).clone()) for p, g in kept])),
    "a deep copy shares .grad": (REFERENCE, torch.nn.Parameter, "__deepcopy__", lambda real, self, memo: then(copied := real(self, memo), assign(copied, "grad", self.grad))),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_torch_is_found(name, monkeypatch):
    says, owner, attribute, new = FAULTS[name]
    real = getattr(owner, attribute)
    call = new if isinstance(new, property) else lambda *args, **options: new(real, *args, **options)
    monkeypatch.setattr(owner, attribute, call, raising=False)
    with pytest.raises(AssertionError, match=says):
        run()


def test_a_derivative_that_is_wrong_in_torch_and_in_the_model_is_found_by_jax(monkeypatch):
    forward, gradient = stateful._Module.forward, stateful.Term.gradient.fget
    monkeypatch.setattr(stateful._Module, "forward", lambda *args: 1.5 * forward(*args))
    monkeypatch.setattr(stateful.Term, "gradient", property(lambda term: 1.5 * gradient(term)))
    with pytest.raises(AssertionError, match="JAX: .*, model: "):
        run()
