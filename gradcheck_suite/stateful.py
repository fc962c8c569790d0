"""`.grad` as a state machine: everything that changes it, in any order, compared with a model of a
few lines.

The model is a heap. A parameter's gradient is None or a `Gradient`: a reference to a `Memory`,
which other references may share, with or without a graph. Each rule does one thing to torch and
says in a few lines what it does to the heap. After each rule, every gradient and every reference
taken so far must be what the heap says. When a machine ends, JAX differentiates the weighted sum of
losses that each memory should hold, in one `jax.vjp`, without the model's formula. All numbers are
small, and most operations are exact, so a difference is never rounding.

This module must not choose settings, skip a rule, or read a tensor other than through
`GradStates.read`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils.checkpoint import checkpoint

NAMES = ("a", "b", "c")
"""The names under which the module has its one to three parameters."""
TIED = ((0, 1, 2), (0, 0, 1), (0, 1, 0), (0, 0, 0))
"""The index of the parameter that each name stands for; names of one parameter are tied."""
UNREACHED = "backward of a loss that reaches no trainable parameter"
REFUSALS = ("does not require grad", "none of output has requires_grad=True", "graph leaves")
"""Parts of torch's messages when it refuses a backward without a graph (plain or in a checkpoint) or a deep copy."""
# with it, steps on the losses below neither grow nor leave the numbers that float32 has
LEARNING_RATE = 0.125
HELD = 12  # references are read after every rule
SMALL = 100.0  # above it nothing is done that lets numbers grow
TOLERANCE = 1e-5  # of the largest number of the run; the smallest fault is an eighth of a gradient

Array = np.ndarray[Any, Any]
Coefficients = tuple[float | None, float | None, float | None]
"""(3,): the factor of each name in a loss; None if the loss does not read the parameter."""


@dataclass(frozen=True)
class LossGradient:
    """The gradient of one loss for one parameter.

    Attributes:
        coefficients: (3,): the loss is the sum of squares of `h`, the sum of coefficient times
            value over the names.
        values: (3, 2): the parameters' values in the forward.
        own: (3,): 1 where the name is the parameter's, else 0.
    """

    coefficients: Array
    values: Array
    own: Array

    @property
    def gradient(self) -> Array:
        """(2,): the gradient by the formula."""
        return 2 * (self.own @ self.coefficients) * (self.coefficients @ self.values)


@dataclass
class Memory:
    """Numbers that several references may share.

    Attributes:
        value: (2,): the numbers.
        terms: the gradients whose weighted sum they are, each with its weights, (2,).
    """

    value: Array = field(default_factory=lambda: np.zeros(2))
    terms: list[tuple[Array, LossGradient]] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[float, LossGradient]]) -> Memory:
        """Add gradients in place."""
        # the formula and the terms are kept side by side: JAX computes the terms again at the end,
        # so a wrong formula does not go unseen
        self.value = self.value + sum(weight * term.gradient for weight, term in terms)
        self.terms += [(np.full(2, weight), term) for weight, term in terms]
        return self

    def scale(self, factor: float | Array) -> None:
        """Multiply in place; a factor of 0 drops the terms."""
        self.value = self.value * factor
        self.terms = (
            [(weight * factor, term) for weight, term in self.terms] if np.any(factor) else []
        )

    def copy(self) -> Memory:
        """Return a copy with the same numbers."""
        return Memory(self.value, list(self.terms))


@dataclass(eq=False)
class Gradient:
    """A gradient: its memory, whether it has a graph, and its tensor once it has been read."""

    memory: Memory
    graph: bool = False
    tensor: torch.Tensor | None = None


@dataclass(eq=False)
class Parameter:
    """The model of one parameter: names, value (2,), gradient, whether it is trainable, hooks by
    kind, hook calls.
    """

    names: tuple[int, ...]
    value: Array
    grad: Gradient | None = None
    trainable: bool = True
    hooks: dict[str, Any] = field(default_factory=dict)
    calls: int = 0


class _Module(torch.nn.Module):
    def forward(self, coefficients: Coefficients, _: torch.Tensor | None = None) -> torch.Tensor:
        read = [
            c * getattr(self, n) for c, n in zip(coefficients, NAMES, strict=True) if c is not None
        ]
        return sum(read).square().sum() if read else torch.zeros(())


@functools.cache
def _gradient_of_history() -> Any:
    # a gradient at each loss's own values: one shift moves the parameter in all losses of the
    # history
    def total(shift: Any, weights: Any, coefficients: Any, values: Any, own: Any) -> Any:
        moved = values + own[:, :, None] * shift
        return (weights * (coefficients[:, :, None] * moved).sum(1) ** 2).sum()

    def gradient(*history: Any) -> Any:
        value, backward = jax.vjp(lambda shift: total(shift, *history), jax.numpy.zeros(2))
        return backward(jax.numpy.ones_like(value))[0]

    return jax.jit(gradient)


def witness(memory: Memory) -> Array:
    """Return the numbers of a memory by JAX, (2,): the gradient of the weighted sum of its losses."""
    nothing = LossGradient(coefficients=np.zeros(3), values=np.zeros((3, 2)), own=np.zeros(3))
    none = (np.zeros(2), nothing)
    # multiples of 64 terms are few shapes, each of which is compiled once
    padding = -len(memory.terms) % 64
    terms = [*memory.terms, *[none] * padding] or [none] * 64
    weights, losses = zip(*terms, strict=True)
    history = [
        np.array([getattr(loss, name) for loss in losses])
        for name in ("coefficients", "values", "own")
    ]
    return np.asarray(_gradient_of_history()(np.array(weights), *history))


coefficients = st.tuples(*[st.sampled_from((1.0, None, -1.0, 2.0, 0.0))] * 3)
names = st.integers(0, 2)
optimizers = st.runner().flatmap(lambda machine: st.sampled_from(tuple(machine.optimizers)))
resets = st.runner().flatmap(lambda machine: st.sampled_from(("module", *machine.optimizers)))
small = precondition(lambda machine: machine.is_small())
with_gradients = precondition(lambda machine: any(p.grad for p in machine.parameters))
# the kernels of foreach are not defined where a tensor is given twice
clips = precondition(
    lambda machine: any(p.grad for p in machine.parameters) and not machine.is_shared()
)


class _Model(RuleBasedStateMachine):
    """The model of every `.grad`, and what must hold of torch after each rule."""

    steps: tuple[str, ...] = ("plain", "foreach", "fused", "first")

    def __init__(
        self,
        *,
        device: str | torch.device = "cpu",
        make_parameter: Callable[[torch.Tensor], torch.nn.Parameter] = torch.nn.Parameter,
        optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    ) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.make_parameter = make_parameter
        self.make_optimizer = optimizer
        self.module = _Module()
        self.parameters: list[Parameter] = []
        self.held: list[Gradient] = []
        self.holds_all = False
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.twins: dict[str, torch.optim.Optimizer] = {}
        self.dtype = torch.float32
        self.largest = 1.0

    # --- the model

    def read(self, tensor: torch.Tensor) -> Array:
        """Return a tensor's numbers in float64.

        Override it for tensors that `Tensor.to("cpu")` cannot copy.
        """
        # a DTensor has its own shard alone, and collects the whole by `full_tensor`
        whole = getattr(tensor.detach(), "full_tensor", tensor.detach)()
        return whole.to("cpu", torch.float64).numpy().copy()

    def tensor(self, p: Parameter) -> torch.nn.Parameter:
        """Return the torch parameter that belongs to a parameter of the model."""
        return self.module.get_parameter(NAMES[p.names[0]])

    def at(self, name: int) -> Parameter:
        """Return the parameter with a name."""
        return next(p for p in self.parameters if name in p.names)

    def is_small(self) -> bool:
        """Return whether all numbers are at most `SMALL`, so that a rule may let them grow."""
        values = [p.value for p in self.parameters]
        values += [p.grad.memory.value for p in self.parameters if p.grad]
        return np.abs(values).max(initial=0) <= SMALL

    def term(self, c: Coefficients, p: Parameter) -> LossGradient:
        """Return the gradient of the loss with respect to a parameter."""
        return LossGradient(
            coefficients=np.array([each or 0.0 for each in c]),
            values=np.array([self.at(name).value for name in range(3)]),
            own=np.isin(range(3), p.names).astype(float),
        )

    def terms(self, c: Coefficients) -> dict[Parameter, list[tuple[float, LossGradient]]]:
        """Return the terms that a backward of the loss adds to each parameter that it reaches."""
        return {
            p: [(2.0 if "doubles" in p.hooks else 1.0, self.term(c, p))]
            for p in self.parameters
            if p.trainable and any(c[name] is not None for name in p.names)
        }

    def accumulate(
        self,
        terms: dict[Parameter, list[tuple[float, LossGradient]]],
        *,
        create_graph: bool = False,
    ) -> None:
        """Add terms to the gradients, in place if there is a gradient already and `create_graph` is
        not set.
        """
        for p, added in terms.items():
            if p.grad is None:
                p.grad = Gradient(Memory().add(added), create_graph)
            elif create_graph:
                # with `create_graph`, autograd adds out of place: the sum is a new tensor, which
                # has a graph
                p.grad = Gradient(p.grad.memory.copy().add(added), graph=True)
            else:
                p.grad.memory.add(added)
            p.calls += "counts" in p.hooks
            if "frees" in p.hooks:
                p.value = p.value - LEARNING_RATE * p.grad.memory.value
                p.grad = None

    def is_shared(self) -> bool:
        """Return whether two parameters share a gradient."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return len(set(grads)) < len(grads)

    @contextlib.contextmanager
    def refused(self, expected: bool, what: str) -> Iterator[None]:
        """Assert that torch raises one of `REFUSALS` if `expected`, and nothing otherwise."""
        try:
            yield
        # any other message is a failure, such as one of a kernel, that must not pass for a refusal
        except RuntimeError as error:
            if not expected or not any(words in str(error) for words in REFUSALS):
                raise
        else:
            assert not expected, f"{what} should raise"

    def same(self, what: str, seen: torch.Tensor, expected: Array) -> None:
        """Fail unless a tensor has the expected numbers."""
        observed = self.read(seen)
        # the largest number so far, and not this one: a sum that cancels keeps the rounding of its
        # terms
        self.largest = max(self.largest, *np.abs(expected))
        assert self.is_alike(observed, expected), f"{what} is {observed}, should be {expected}"

    def is_alike(self, observed: Array, expected: Array) -> bool:
        """Return whether numbers are equal up to rounding."""
        alike = (
            observed.shape == expected.shape
            and np.abs(observed - expected).max() <= TOLERANCE * self.largest
        )
        return bool(alike)

    # --- what must hold after every rule

    @invariant()
    def gradients_are_as_expected(self) -> None:
        """Compare each gradient: None or not, same tensor or new, with a graph or not, dtype,
        numbers.
        """
        for p in self.parameters:
            tensor = self.tensor(p)
            what = f"{NAMES[p.names[0]]}.grad"
            seen = tensor.grad
            assert (seen is None) == (p.grad is None), (
                f"{what} is {seen}, should be {p.grad and p.grad.memory.value}"
            )
            if seen is None or p.grad is None:
                continue
            # the first look at a gradient: it must be a tensor that nothing has held before
            if p.grad.tensor is None:
                assert all(seen is not each.tensor for each in self.held), (
                    f"{what} should be a new tensor"
                )
                p.grad.tensor = seen
                if self.holds_all and len(self.held) < HELD:
                    self.take_reference(p.grad)
            # identity and not equality: an optimizer or a reducer that holds the old tensor would
            # go on with it
            assert seen is p.grad.tensor, f"{what} should be the same tensor as before"
            graphs = (seen.grad_fn is not None, seen.requires_grad)
            assert graphs == (p.grad.graph,) * 2, (
                f"{what} should have {'a' if p.grad.graph else 'no'} graph"
            )
            assert seen.dtype == tensor.dtype == self.dtype, (
                f"{what} is {seen.dtype}, should be {self.dtype}"
            )
            self.same(what, seen, p.grad.memory.value)

    @invariant()
    def references_see_what_they_should(self) -> None:
        """Check that an alias has seen every in-place change, and a copy none."""
        for each in self.held:
            assert each.tensor is not None
            self.same("a reference taken on the way", each.tensor, each.memory.value)
            assert each.tensor.requires_grad == each.graph, (
                "a reference should have kept its graph, or none"
            )

    @invariant()
    def parameters_are_as_expected(self) -> None:
        """Compare the parameters' values, whether they are trainable, and how often their hooks
        were called.
        """
        for p in self.parameters:
            for name in p.names:
                self.same(
                    f"parameter {NAMES[name]}", self.module.get_parameter(NAMES[name]), p.value
                )
            assert self.tensor(p).requires_grad == p.trainable, (
                f"{NAMES[p.names[0]]}.requires_grad, {p.trainable}"
            )
            if "counts" in p.hooks:
                seen = len(p.hooks["counts"][1])
                assert seen == p.calls, (
                    f"a hook of {NAMES[p.names[0]]} was called {seen} times, should be {p.calls}"
                )

    def teardown(self) -> None:
        """Compare each memory with the gradient that JAX computes from its terms."""
        grads = [*self.held, *(p.grad for p in self.parameters if p.grad is not None)]
        # each memory once, though several references share it
        for memory in {id(grad.memory): grad.memory for grad in grads}.values():
            seen = witness(memory)
            assert self.is_alike(seen, memory.value), f"JAX: {seen}, model: {memory.value}"
        self.module.zero_grad()  # a gradient with a graph and its parameter hold each other

    # --- the rules

    @initialize(
        names=st.sampled_from(TIED),
        values=st.tuples(*[st.integers(1, 3)] * 6),
        holds_all=st.booleans(),
    )
    def start(self, names: tuple[int, ...], values: tuple[int, ...], holds_all: bool) -> None:
        """Make one to three parameters; with `holds_all`, keep a reference to each new gradient."""
        self.holds_all = holds_all
        tensors = []
        for i in sorted(set(names)):
            value = np.array(values[2 * i : 2 * i + 2], float)
            own = tuple(n for n in range(3) if names[n] == i)
            tensors.append(
                self.make_parameter(torch.tensor(value, dtype=self.dtype, device=self.device))
            )
            self.parameters.append(Parameter(own, value))
            for name in own:
                self.module.register_parameter(NAMES[name], tensors[-1])
        if self.make_optimizer is not None:
            self.optimizers = {
                "all": self.make_optimizer(tensors),
                "first": self.make_optimizer(tensors[:1]),
            }
            # an unknown optimizer has no formula here, so a second one on plain tensors says what
            # its step is
            plain = [torch.nn.Parameter(self.plain(p.value)) for p in self.parameters]
            self.twins = {
                "all": self.make_optimizer(plain),
                "first": self.make_optimizer(plain[:1]),
            }
            return
        sgd = functools.partial(torch.optim.SGD, lr=LEARNING_RATE)
        options = {
            "plain": {"foreach": False},
            "foreach": {"foreach": True},
            "fused": {"fused": True},
            "first": {},
        }
        self.optimizers = {
            name: sgd(tensors[: 1 if name == "first" else 3], **options[name])
            for name in self.steps
        }

    def take_reference(self, grad: Gradient) -> None:
        """Keep a gradient, a tensor of the same memory, and a copy."""
        assert grad.tensor is not None
        detached = grad.tensor.detach()
        self.held += [grad, Gradient(grad.memory, tensor=detached)]
        self.held.append(Gradient(grad.memory.copy(), tensor=detached.clone()))

    def plain(self, value: Array) -> torch.Tensor:
        """Return numbers as a tensor of the machine's dtype and device."""
        return torch.tensor(value, dtype=self.dtype, device=self.device)


class _BackwardRules(_Model):
    """The rules that add to gradients."""

    @small
    @rule(c=coefficients, how=st.sampled_from(("plain", "twice", "no_grad")))
    def backward(self, c: Coefficients, how: str) -> None:
        """Backward of a loss, perhaps twice, or under `no_grad`."""
        terms = self.terms(c)
        with self.refused(not terms, UNREACHED):
            loss = self.module(c)
            if how == "twice":
                loss.backward(retain_graph=True)
                self.accumulate(terms)
            with torch.set_grad_enabled(how != "no_grad"):
                loss.backward()
            self.accumulate(terms)

    @small
    @rule(c=coefficients)
    def backward_into_inputs(self, c: Coefficients) -> None:
        """Backward into one of the parameters that the loss reaches."""
        # the last, so that it is not always the parameter that an optimizer has first
        for p, added in list(self.terms(c).items())[-1:]:
            self.module(c).backward(inputs=[self.tensor(p)])
            self.accumulate({p: added})

    @small
    @rule(c=coefficients)
    def backward_with_graph(self, c: Coefficients) -> None:
        """Backward with `create_graph`."""
        terms = self.terms(c)
        with self.refused(not terms, UNREACHED), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
            self.module(c).backward(create_graph=True)
            self.accumulate(terms, create_graph=True)

    @small
    @rule(c=coefficients, use_reentrant=st.booleans())
    def backward_through_checkpoint(self, c: Coefficients, use_reentrant: bool) -> None:
        """Backward through a checkpoint, which recomputes the loss.

        A reentrant one runs a backward inside.
        """
        terms = self.terms(c)  # it wants an input that is trainable
        one = torch.ones((), requires_grad=True)
        with self.refused(not terms, UNREACHED):
            checkpoint(
                self.module, c, one, use_reentrant=use_reentrant, preserve_rng_state=False
            ).backward()
            self.accumulate(terms)

    @small
    @rule(first=coefficients, second=coefficients)
    def backward_of_several_roots(self, first: Coefficients, second: Coefficients) -> None:
        """One backward of two losses, which adds to each parameter once."""
        one = self.terms(first)
        two = self.terms(second)
        with self.refused(not (one and two), UNREACHED):
            torch.autograd.backward([self.module(first), self.module(second)])
            # the engine adds both before it accumulates: a hook sees one gradient
            both = {p: one.get(p, []) + two.get(p, []) for p in one | two}
            self.accumulate(both)

    @rule(c=coefficients, mode=st.sampled_from((torch.no_grad, torch.inference_mode)))
    def forward_without_graph(self, c: Coefficients, mode: Callable[[], Any]) -> None:
        """Backward of a loss computed without a graph, which torch refuses."""
        with mode():
            loss = self.module(c)
        with self.refused(True, f"backward of a loss under {mode.__name__}"):
            loss.backward()

    @rule(c=coefficients, create_graph=st.booleans())
    def autograd_grad(self, c: Coefficients, create_graph: bool) -> None:
        """`torch.autograd.grad` returns gradients and leaves `.grad` alone."""
        terms = self.terms(c)
        if terms:
            loss = self.module(c)
            seen = torch.autograd.grad(
                loss, [self.tensor(p) for p in terms], create_graph=create_graph
            )
            for tensor, added in zip(seen, terms.values(), strict=True):
                self.held.append(Gradient(Memory().add(added), create_graph, tensor))

    @small
    @rule(c=coefficients, name=names)
    def functional_call(self, c: Coefficients, name: int) -> None:
        """Backward through a functional call: the gradient goes to the tensor that replaces the
        parameter.
        """
        p = self.at(name)
        # the call does not read it, so the leaf would get no gradient
        if c[name] is None:
            return
        leaf = self.tensor(p).detach().clone().requires_grad_()
        term = self.term(c, p)
        terms = self.terms(c)
        torch.func.functional_call(self.module, {NAMES[name]: leaf}, (c,)).backward()
        self.accumulate({other: added for other, added in terms.items() if other is not p})
        assert leaf.grad is not None, (
            "what functional_call puts in place of a parameter should get its gradient"
        )
        self.held.append(Gradient(Memory().add([(1.0, term)]), tensor=leaf.grad))


class _GradientRules(_Model):
    """The rules that read, reset or change gradients which are there."""

    @with_gradients
    @rule()
    def take_references(self) -> None:
        """Keep references: each gradient, a tensor of the same memory, and a copy."""
        self.held.clear()
        for p in self.parameters:
            if p.grad is not None:
                self.take_reference(p.grad)

    @with_gradients
    @rule(which=resets)
    def zero_grad(self, which: str) -> None:
        """Zero the gradients of the module or of an optimizer, and detach them."""
        (self.module if which == "module" else self.optimizers[which]).zero_grad(set_to_none=False)
        for p in self.parameters[: 1 if which == "first" else 3]:
            if p.grad is not None:
                p.grad.graph = False
                p.grad.memory.scale(0)

    @with_gradients
    @rule(which=resets)
    def zero_grad_to_none(self, which: str) -> None:
        """Set the gradients of the module or of an optimizer to None."""
        (self.module if which == "module" else self.optimizers[which]).zero_grad()
        for p in self.parameters[: 1 if which == "first" else 3]:
            p.grad = None

    @with_gradients
    @rule(name=names, how=st.sampled_from(("zero_", "None", "del")))
    def reset_by_hand(self, name: int, how: str) -> None:
        """Reset one gradient without `zero_grad`; `zero_` keeps the graph."""
        p = self.at(name)
        tensor = self.tensor(p)
        if how == "None":
            tensor.grad = None
        elif how == "del":
            del tensor.grad
        elif p.grad is not None and tensor.grad is not None:
            with torch.no_grad():
                tensor.grad.zero_()
            p.grad.memory.scale(0)
        p.grad = p.grad if how == "zero_" else None

    @with_gradients
    @rule(by=st.sampled_from((-0.5, 1.5)))
    def scale_by_hand(self, by: float) -> None:
        """Scale every gradient in place, as a loop that unscales or averages does."""
        for p in self.parameters:
            if p.grad is not None and p.grad.tensor is not None:
                with torch.no_grad():
                    p.grad.tensor.mul_(by)
                p.grad.memory.scale(by)

    @with_gradients
    @rule(name=names, other=names, how=st.sampled_from(("detach_", "clone", "other")))
    def change_by_hand(self, name: int, other: int, how: str) -> None:
        """Detach or replace one gradient."""
        p = self.at(name)
        tensor = self.tensor(p)
        if how == "other":
            # else the order of accumulation would count
            if not any("frees" in each.hooks for each in self.parameters):
                tensor.grad = self.tensor(self.at(other)).grad
                p.grad = self.at(other).grad
        elif p.grad is not None and tensor.grad is not None:
            if how == "clone":
                tensor.grad = tensor.grad.clone()
                p.grad = Gradient(p.grad.memory.copy(), p.grad.graph)
            else:
                tensor.grad.detach_()
                p.grad.graph = False

    @clips
    @rule(foreach=st.booleans())
    def clip_norm(self, foreach: bool) -> None:
        """Clip the norm of all gradients to 1."""
        memories = [p.grad.memory for p in self.parameters if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0, foreach=foreach)
        norm = float(np.linalg.norm([memory.value for memory in memories]))
        for memory in memories:
            # torch's own epsilon beside the norm
            memory.scale(min(1.0, 1 / (norm + 1e-6)))

    @clips
    @rule(foreach=st.booleans())
    def clip_value(self, foreach: bool) -> None:
        """Clip each element to [-2, 2]."""
        torch.nn.utils.clip_grad_value_(self.module.parameters(), 2.0, foreach=foreach)
        for p in self.parameters:
            if p.grad is not None:
                # a factor for each element, so that the terms follow and JAX can check them
                p.grad.memory.scale(2 / np.maximum(2, np.abs(p.grad.memory.value)))

    @rule(name=names, kind=st.sampled_from(("doubles", "counts", "frees")))
    def register_hook(self, name: int, kind: str) -> None:
        """Add a hook that doubles the gradient, counts, or steps and frees the gradient inside the
        backward.
        """
        p = self.at(name)
        calls = list[int]()
        tensor = self.tensor(p)
        # torch refuses a hook on a tensor without gradient; of a shared gradient the first
        # parameter would step and the second find the memory changed
        if kind in p.hooks or not p.trainable or (kind == "frees" and self.is_shared()):
            return
        if kind == "doubles":
            p.hooks[kind] = tensor.register_hook(lambda gradient: 2 * gradient), calls
        else:
            does = _step_and_free if kind == "frees" else lambda _: calls.append(1)
            p.hooks[kind] = tensor.register_post_accumulate_grad_hook(does), calls
        p.calls = 0 if kind == "counts" else p.calls

    @precondition(lambda machine: any(p.hooks for p in machine.parameters))
    @rule()
    def remove_hooks(self) -> None:
        """Remove all hooks."""
        for p in self.parameters:
            for handle, _ in p.hooks.values():
                handle.remove()
            p.hooks.clear()


class GradStates(_GradientRules, _BackwardRules):
    """A state machine of Hypothesis over everything that changes `.grad`.

    `hypothesis.stateful.run_state_machine_as_test(lambda: GradStates(...))` runs it. A subclass
    leaves out a rule by setting its name to None, and can add rules.

    Args:
        device: the device of the parameters.
        make_parameter: tensor of shape (2,) on `device` -> a parameter; by default
            `torch.nn.Parameter`.
        optimizer: list of parameters -> an optimizer. Each of its steps must equal that of a second
            optimizer, whose parameters are plain tensors with gradients that are not shared. By
            default the optimizers are `torch.optim.SGD`, plain, foreach and fused, whose steps a
            formula predicts.

    Attributes:
        steps: the optimizers that step: `"plain"`, `"foreach"`, `"fused"`, and `"first"`, which has
            only the first parameter.
    """

    @small
    @rule(which=optimizers, closure=st.one_of(st.none(), coefficients))
    def step(self, which: str, closure: Coefficients | None) -> None:
        """Step one of several optimizers over the same parameters, perhaps with a closure.

        No gradient changes.
        """
        terms = self.terms(closure) if closure else {}
        optimizer = self.optimizers[which]

        def compute() -> torch.Tensor:
            loss = self.module(closure)
            loss.backward()
            return loss

        if terms:
            self.accumulate(terms)
            optimizer.step(compute)  # type: ignore[arg-type]
        else:
            optimizer.step()
        stepped = self.parameters[: 1 if which == "first" else 3]
        if which in self.twins:
            self.step_of_twin(self.twins[which], stepped)
            return
        for p in stepped:
            if p.grad is not None:
                p.value = p.value - LEARNING_RATE * p.grad.memory.value

    def step_of_twin(self, twin: torch.optim.Optimizer, stepped: list[Parameter]) -> None:
        """Take the values that the second optimizer, whose gradients are not shared, gives the
        parameters.
        """
        plain = twin.param_groups[0]["params"]
        for p, each in zip(stepped, plain, strict=True):
            each.data = each.data.to(self.dtype)
            each.data.copy_(self.plain(p.value))
            # an optimizer may divide by it, and turn rounding into a step
            seen = self.tensor(p).grad
            each.grad = None if seen is None else self.plain(self.read(seen))
        twin.step()
        for p, each in zip(stepped, plain, strict=True):
            p.value = self.read(each)

    @rule(name=names, flag=st.booleans())
    def requires_grad_(self, name: int, flag: bool) -> None:
        """Freeze or unfreeze a parameter; its gradient stays."""
        self.tensor(self.at(name)).requires_grad_(flag)
        self.at(name).trainable = flag

    @rule(name=names, by=st.sampled_from((0.5, -1.0)))
    def data(self, name: int, by: float) -> None:
        """Assign `.data`; the gradient stays."""
        p = self.at(name)
        self.tensor(p).data = self.tensor(p).detach() * by
        p.value = p.value * by

    @rule(by=st.sampled_from((0.5, -1.0)), optimizer=st.booleans())
    def load_state_dict(self, by: float, optimizer: bool) -> None:
        """Load new values, or an optimizer's own state; gradients stay."""
        if optimizer:
            for each in self.optimizers.values():
                each.load_state_dict(copy.deepcopy(each.state_dict()))
            return
        self.module.load_state_dict(
            {name: each * by for name, each in self.module.state_dict().items()}
        )
        for p in self.parameters:
            p.value = p.value * by

    # torch leaves it to users to convert what an optimizer keeps
    @precondition(lambda machine: machine.make_optimizer is None)
    @rule(dtype=st.sampled_from((torch.float64, torch.float32)))
    def to_dtype(self, dtype: torch.dtype) -> None:
        """Change the dtype: a gradient keeps its tensor and gets a new memory."""
        if dtype != self.dtype:
            self.module.to(dtype)
            self.dtype = dtype
            for grad in {
                id(p.grad): p.grad for p in self.parameters if p.grad is not None
            }.values():
                grad.memory = grad.memory.copy()

    @rule()
    def deepcopy(self) -> None:
        """Deep-copy the module: the copy has gradients of its own, or none, as `torch.nn.Parameter`
        (pytorch#95711).
        """
        tensors = [self.tensor(p) for p in self.parameters if p.grad is not None and p.grad.graph]
        refuses = any(type(each).__deepcopy__ is torch.Tensor.__deepcopy__ for each in tensors)
        with self.refused(refuses, "deepcopy of a tensor whose gradient has a graph"):
            twin = copy.deepcopy(self.module)
        if refuses:
            return
        for p in self.parameters:
            seen = twin.get_parameter(NAMES[p.names[0]]).grad
            if seen is not None:
                assert p.grad is not None, "the copy has a gradient where the module has None"
                self.held.append(replace(p.grad, memory=p.grad.memory.copy(), tensor=seen))


def _step_and_free(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.sub_(tensor.grad, alpha=LEARNING_RATE)  # type: ignore[arg-type]
    tensor.grad = None
