"""`.grad` as a state machine: what touches it in any order, and the planted faults of torch that
the machine finds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from gradcheck_suite import stateful
from gradcheck_suite.stateful import GradStates
from properties.devices import DEVICES
from properties.helpers import scaled


def run(machine: Callable[[], GradStates] = GradStates, **options: Any) -> None:
    """Run a machine for the examples of the profile; one failure is enough."""
    only = {"phases": [Phase.generate], "report_multiple_bugs": False, "print_blob": False}
    run_state_machine_as_test(machine, settings=settings(**only | options))


@pytest.mark.share(4)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_what_the_model_says_after_anything(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("a wrapper subclass plays the device, whose `.data` cannot be assigned")
    run(lambda: GradStates(device=device), phases=list(Phase))


@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "RMSprop"])
def test_steps_do_not_depend_on_who_else_holds_a_gradient(name):
    run(
        lambda: GradStates(optimizer=getattr(torch.optim, name)),
        max_examples=scaled(10).max_examples,
    )


# --- planted faults of torch

FAULTS: dict[str, tuple[str, Any, str, Any]] = {}
Tensor, Module = torch.Tensor, torch.nn.Module
SAME, REFERENCE, NONE = (
    "the same tensor as before",
    "a reference taken on the way",
    "grad is .*should be None",
)
NO_GRAPH, GRAPH, VALUE, PARAMETER = (
    "have no graph",
    "have a graph",
    r" is \[.*should be",
    "parameter . is",
)
IS_NONE = r"grad is None, should be \["
BUFFER = torch.zeros(2)


def fault(says: str, owner: Any, name: str) -> Callable[[Any], None]:
    """Plant a function, given the real one first, in place of `owner.name`.

    The machine then says `says`.
    """

    def add(new: Any) -> None:
        FAULTS[new.__name__] = (says, owner, name, new)

    return add


def leaves(roots: Any) -> list[torch.Tensor]:
    """Return the leaves that a backward reaches."""
    todo, seen = [root.grad_fn for root in ([roots] if isinstance(roots, Tensor) else roots)], []
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.append(node)
            todo += [following for following, _ in node.next_functions]
    return [node.variable for node in seen if hasattr(node, "variable")]


def accumulation(
    says: str,
) -> Callable[[Callable[[torch.Tensor, torch.Tensor | None], None]], None]:
    """Plant what happens to a leaf after a backward, given a copy of its gradient before."""

    def add(change: Callable[[torch.Tensor, torch.Tensor | None], None]) -> None:
        def backward(real: Any, roots: Any, *args: Any, **options: Any) -> None:
            before = [
                (leaf, None if leaf.grad is None else leaf.grad.detach().clone())
                for leaf in leaves(roots)
            ]
            real(roots, *args, **options)
            for leaf, gradient in before:
                if leaf.grad is not None:
                    change(leaf, gradient)

        FAULTS[change.__name__] = (says, torch.autograd, "backward", backward)

    return add


def accessor(says: str, name: str, part: str) -> Callable[[Any], None]:
    """Plant a setter or deleter of a property of tensors, given torch's property first."""

    def add(new: Any) -> None:
        real = getattr(torch._C.TensorBase, name)
        parts = {"fget": real.__get__, "fset": real.__set__, "fdel": real.__delete__}
        parts[part] = lambda *args: new(real, *args)
        FAULTS[new.__name__] = (says, Tensor, name, property(**parts))

    return add


def with_gradient(p: Optimizer | Module) -> list[Any]:
    """Return the parameters of a module or an optimizer that have a gradient."""
    every = p.parameters() if isinstance(p, Module) else p.param_groups[0]["params"]
    return [each for each in every if each.grad is not None]


@accumulation(SAME)
def accumulation_makes_a_new_tensor(leaf, before):
    leaf.grad = leaf.grad.clone()


@accumulation(VALUE)
def accumulation_overwrites(leaf, before):
    leaf.grad.data.sub_(0 if before is None else before)


@accumulation(f"{VALUE}|{SAME}")
def accumulation_keeps_a_buffer_that_others_hold(leaf, before):
    if before is None and leaf.dtype == BUFFER.dtype and not leaf.grad.requires_grad:
        leaf.grad = BUFFER.copy_(leaf.grad).detach()


@accumulation(GRAPH)
def create_graph_gives_no_graph(leaf, before):
    leaf.grad = leaf.grad.detach() if leaf.grad.requires_grad else leaf.grad


@fault(VALUE, torch.autograd, "backward")
def the_second_root_is_forgotten(real, roots, *args, **options):
    real(roots if isinstance(roots, Tensor) else roots[:1], *args, **options)


@fault(f"{VALUE}|{NONE}", torch.autograd, "backward")
def inputs_are_ignored(real, *args, inputs=None, **options):
    real(*args, **options)


@fault(VALUE, stateful, "checkpoint")
def a_checkpoint_adds_twice(real, *args, **options):
    return 2 * real(*args, **options)


@fault("should raise", torch.autograd, "backward")
def a_loss_without_a_graph_is_accepted(real, *args, **options):
    with contextlib.suppress(RuntimeError):
        real(*args, **options)


@fault(f"{VALUE}|{NONE}", torch.autograd, "grad")
def autograd_grad_accumulates(real, loss, *args, **options):
    loss.backward(retain_graph=True)
    return real(loss, *args, **options)


@fault("functional_call puts in place", torch.func, "functional_call")
def functional_call_reads_the_module(real, module, _, args):
    return module(*args)


@fault(REFERENCE, Tensor, "zero_")
def zero_takes_new_memory(real, self):
    self.data = torch.zeros_like(self)


@fault(NONE, Optimizer, "zero_grad")
def set_to_none_leaves_zeros(real, self, set_to_none=True):
    real(self, set_to_none=False)


@fault(IS_NONE, Optimizer, "zero_grad")
def zeroing_leaves_none(real, self, set_to_none=True):
    real(self, set_to_none=True)


@fault(SAME, Module, "zero_grad")
def zeroing_assigns_zeros(real, self, set_to_none=True):
    for p in with_gradient(self):
        p.grad = None if set_to_none else torch.zeros_like(p)


@fault(NO_GRAPH, Optimizer, "zero_grad")
def zeroing_keeps_the_graph(real, self, set_to_none=True):
    for p in with_gradient(self):
        p.grad = None if set_to_none else p.grad.mul_(0)


@fault(VALUE, torch, "_foreach_zero_")
def foreach_forgets_the_last_gradient(real, tensors):
    if len(tensors) > 1:
        real(tensors[:-1])


@accessor(NONE, "grad", "fset")
def assigning_none_leaves_zeros(real, self, new):
    if new is None and self.grad is not None:
        self.grad.zero_()
    else:
        real.__set__(self, new)


@accessor(NONE, "grad", "fdel")
def del_leaves_zeros(real, self):
    if self.grad is not None:
        self.grad.zero_()


@accessor(f"{VALUE}|{SAME}", "grad", "fset")
def assigning_copies(real, self, new):
    real.__set__(self, None if new is None else new.clone())


@fault(f"{GRAPH}|{VALUE}", Tensor, "clone")
def clone_shares_memory(real, self, **options):
    return self.detach()


@fault(NO_GRAPH, Tensor, "detach_")
def detach_keeps_the_graph(real, self):
    return self


@fault(REFERENCE, Tensor, "mul_")
def mul_takes_new_memory(real, self, by):
    self.data = self.data * by


@fault(SAME, torch.nn.utils, "clip_grad_norm_")
def clipping_assigns(real, parameters, *args, **options):
    for p in (kept := list(parameters)):
        p.grad = None if p.grad is None else p.grad.clone()
    real(kept, *args, **options)


@fault(VALUE, torch.nn.utils, "clip_grad_norm_")
def clipping_takes_each_norm_by_itself(real, parameters, *args, **options):
    for p in parameters:
        real([p], *args, **options)


@fault(VALUE, torch.nn.utils, "clip_grad_value_")
def clipping_stops_at_twice_the_value(real, parameters, value, **options):
    real(parameters, 2 * value, **options)


@fault(VALUE, Tensor, "register_hook")
def a_hook_fires_twice(real, self, hook):
    return real(self, lambda gradient: hook(hook(gradient)))


@fault(f"{VALUE}|{IS_NONE}|{PARAMETER}", RemovableHandle, "remove")
def a_removed_hook_fires(real, self):
    pass


@fault(rf"was called \d times|{VALUE}|{IS_NONE}", Tensor, "register_post_accumulate_grad_hook")
def a_hook_after_accumulation_fires_twice(real, self, hook):
    real(self, lambda p: None if p.grad is None else hook(p))
    return real(self, lambda p: None if p.grad is None else hook(p))


@fault(f"was called 0 times|{VALUE}|should be None", Tensor, "register_post_accumulate_grad_hook")
def a_hook_after_accumulation_is_lost(real, self, hook):
    return real(self, lambda p: None)


@fault(VALUE, SGD, "step")
def a_step_writes_grad(real, self, *args):
    real(self, *args)
    for p in with_gradient(self):
        p.grad.data.add_(p.data)


@fault(IS_NONE, SGD, "step")
def a_step_frees_grad(real, self, *args):
    real(self, *args)
    self.zero_grad()


@fault(f"{VALUE}|{NONE}|{IS_NONE}|was called|{GRAPH}", SGD, "step")
def a_closure_is_not_called(real, self, *args):
    real(self)


@fault(PARAMETER, torch, "_foreach_add_")
def foreach_forgets_the_last_parameter(real, first, second, **options):
    if len(first) > 1:
        real(first[:-1], second[:-1], **options)


@fault(PARAMETER, torch, "_fused_sgd_")
def fused_has_another_rate(real, *args, lr, **options):
    real(*args, lr=2 * lr, **options)


@fault(IS_NONE, Module, "load_state_dict")
def load_state_dict_resets_grad(real, self, *args):
    real(self, *args)
    self.zero_grad()


@fault(IS_NONE, Optimizer, "load_state_dict")
def load_state_dict_of_an_optimizer_resets_grad(real, self, *args):
    real(self, *args)
    self.zero_grad()


@fault(IS_NONE, Tensor, "requires_grad_")
def freezing_drops_grad(real, self, flag=True):
    if self.is_leaf and not flag:
        self.grad = None
    return real(self, flag)


@accessor(f"{IS_NONE}|must not be None", "data", "fset")
def assigning_data_drops_grad(real, self, new):
    real.__set__(self, new)
    self.grad = None


@fault(IS_NONE, Module, "to")
def to_drops_grad(real, self, dtype):
    real(self, dtype)
    self.zero_grad()


@fault(f"{SAME}|should be torch", Module, "to")
def to_assigns_grad(real, self, dtype):
    kept = {p: p.grad.clone() for p in with_gradient(self)}
    self.zero_grad()
    real(self, dtype)
    for p, gradient in kept.items():
        p.grad = gradient.to(dtype)


# what they share shows by its values, or by its graph where `detach_` took it
@fault(
    "a reference (taken on the way|should have kept its graph)",
    torch.nn.Parameter,
    "__deepcopy__",
)
def a_deep_copy_shares_grad(real, self, memo):
    copied = real(self, memo)
    copied.grad = self.grad
    return copied


SLOW = (
    "foreach_forgets_the_last_gradient",
    "assigning_copies",
    "clipping_takes_each_norm_by_itself",
    "zeroing_keeps_the_graph",
)
"""Faults that are found after seconds."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in FAULTS]
)
def test_a_fault_of_torch_is_found(name, monkeypatch):
    says, owner, attribute, new = FAULTS[name]
    real = getattr(owner, attribute)
    call = (
        new if isinstance(new, property) else lambda *args, **options: new(real, *args, **options)
    )
    monkeypatch.setattr(owner, attribute, call, raising=False)
    # where the module itself is frozen, what reads it in place of a copy has no graph
    with pytest.raises((AssertionError, RuntimeError), match=f"{says}|does not require grad"):
        run(max_examples=5 * settings().max_examples)  # it ends with the first that shows the fault


def test_a_derivative_that_torch_and_the_model_have_wrong_is_found_by_jax(monkeypatch):
    forward, gradient = stateful._Module.forward, stateful.LossGradient.gradient.fget
    monkeypatch.setattr(stateful._Module, "forward", lambda *args: 1.5 * forward(*args))
    monkeypatch.setattr(
        stateful.LossGradient, "gradient", property(lambda term: 1.5 * gradient(term))
    )
    with pytest.raises(AssertionError, match=r"JAX: .*, model: "):
        run()
