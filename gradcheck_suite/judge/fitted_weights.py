"""Fitting weights to a wrong gradient: least squares on the gradients of the case's own
micro-batches.

The weight probe shows what a loop does to weights in general. Where it shows nothing (a fault that
depends on the model: one parameter, a hook, a buffer) or cannot run (a trainer that takes one kind
of model), the weights are fitted to the case itself, to all elements and then parameter by
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.core.comparison import Comparison, Vector, beyond, within
from gradcheck_suite.errors import UsageError
from gradcheck_suite.judge.elements import diagnose_elements, with_second_names, wrong_and_right
from gradcheck_suite.judge.naming import constant_meaning, diagnose, factor_meanings, names_nothing
from gradcheck_suite.judge.weights import Diagnosis, Weights, any_of, trial_weights
from gradcheck_suite.reference.large_batch import Gradients, WindowReference, gradients_of
from gradcheck_suite.run.instance import Instance, seeded

MOST_NAMES = 3
"""Faults that one gradient may leave open."""
CONDITION = 1e-7
"""Singular values below this share of the largest are left out: with them the weights would have fewer than half of
the digits of float64."""


@dataclass(frozen=True)
class WeightFit:
    """The least-squares weights.

    Attributes:
        weights: (B,) float64: the weight of each micro-batch.
        determined: whether the solution is unique.
        exact: whether rounding explains the residual of every element.
    """

    weights: npt.NDArray[np.float64]
    determined: bool
    exact: bool


def fit_weights(observed: Vector, gradients: npt.NDArray[np.float64], allowed: Vector) -> WeightFit:
    """Fit weights by least squares: observed = sum over j of weight[j] * gradient[j].

    Each micro-batch's gradient is first scaled to length 1, so that `CONDITION` does not remove a
    small one.

    Args:
        observed: (P,) finite: the observed gradient.
        gradients: (B, P) finite: each micro-batch's gradient.
        allowed: (P,): the largest error of `observed` that rounding explains.
    """
    sizes = np.linalg.norm(gradients, axis=1)
    present = sizes > 0
    weights = np.zeros(len(gradients))
    if not present.any():
        return WeightFit(weights, False, within(observed, 0, allowed))
    # a gradient of zeros has no direction, and any weight fits it
    columns = (gradients[present] / sizes[present, None]).T
    left, values, right = np.linalg.svd(columns, full_matrices=False)
    kept = values > CONDITION * values[0]
    # of all weights that fit, the smallest: a direction that is not determined gets 0
    solution = right[kept].T @ ((left[:, kept].T @ observed) / values[kept])
    weights[present] = solution / sizes[present]
    residual = np.abs(observed - weights @ gradients)
    # the fit itself has rounding errors, which appear in the residual
    rounding = (
        64
        * np.finfo(np.float64).eps
        * np.abs(weights[:, None] * gradients).sum(axis=0)
        / values[kept].min()
    )
    return WeightFit(
        weights,
        determined=bool(kept.sum() == present.sum()),
        exact=bool((residual <= allowed + rounding).all()),
    )


# Gradients that share memory with something else, which makes the reset mode change the gradient.


Parameters = dict[str, torch.nn.Parameter]
Backwards = Sequence[Callable[[], torch.Tensor]]

_SENTINEL = 0.8125
"""What a gradient is filled with to see who writes into it: exact in every floating dtype."""


@dataclass(frozen=True)
class StolenBuffer:
    """A parameter whose gradient shares memory with something else.

    Attributes:
        kind: `"rewritten"` where a later backward writes into the gradient by itself, `"shared"`
            where two parameters' gradients overlap in memory.
        parameter: the parameter whose gradient it is.
        other: for `"shared"`, the other parameter.
        error: largest difference between the sums after a reset to None and after a reset to zeros.
        sentence: what happens.
    """

    kind: Literal["rewritten", "shared"]
    parameter: str
    other: str | None
    error: float
    sentence: str

    @property
    def explanation(self) -> str:
        """What happens and what to do."""
        return self.diagnosis.explanation()

    @property
    def diagnosis(self) -> Diagnosis:
        """The diagnosis of a gradient that is wrong because of it."""
        return Diagnosis("stolen-buffer", self.sentence)


def find_stolen_buffers(
    model: torch.nn.Module,
    loss: Callable[[torch.nn.Module, Any], torch.Tensor],
    batches: Sequence[Any],
) -> tuple[StolenBuffer, ...]:
    """Look for gradients that share memory with each other or with what backward writes into.

    A backward that returns a view of a buffer which it will use again (a static buffer of a CUDA
    graph, a workspace of a hand-written `autograd.Function`) may give that buffer away as a
    gradient.

    Parameters and their `.grad` are left as they were; buffers that a forward updates are not.

    Args:
        model: the model whose trainable parameters are checked.
        loss: (model, batch) -> the scalar loss of a micro-batch.
        batches: micro-batches, at least two.

    Raises:
        UsageError: fewer than two micro-batches, or no trainable parameter.
    """
    if len(batches) < 2:
        raise UsageError(
            f"find_stolen_buffers: expected at least 2 micro-batches, got {len(batches)}: pass more"
        )
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise UsageError("find_stolen_buffers: the model has no parameter with requires_grad=True")
    with _gradients_kept(parameters), torch.enable_grad():
        losses = [lambda batch=batch: loss(model, batch) for batch in batches]
        # with `.grad` None, autograd takes the tensor that backward returned and does not copy it,
        # so that the next backward may overwrite the sum; zeros are memory of their own:
        # https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/functions/accumulate_grad.h
        released, zeroed = (_sums(parameters, losses, zeros=zeros) for zeros in (False, True))
        apart = {name: (released[name] - zeroed[name]).abs() for name in parameters}
        error = {
            name: float(apart[name].max()) if apart[name].numel() else 0.0 for name in parameters
        }
        rewritten = _rewritten(parameters, losses)
        shared = _shared(parameters, losses[0])
    found = []
    for name in rewritten:
        why = (
            f"{name}.grad shares its storage with a buffer that the next backward writes: with"
            " .grad None, autograd takes the tensor that backward returned instead of copying it,"
            f" and the sum of the earlier micro-batches is lost. Over {len(batches)} micro-batches"
            f" set_to_none and zero_ differ by {error[name]:.3g}"
        )
        found.append(
            StolenBuffer(
                "rewritten",
                name,
                None,
                error[name],
                why,
            )
        )
    for a, b in shared:
        why = f"{a}.grad and {b}.grad overlap in memory, so what is added to one changes the other"
        found.append(
            StolenBuffer(
                "shared",
                a,
                b,
                max(error[a], error[b]),
                why,
            )
        )
    return tuple(found)


@contextmanager
def _gradients_kept(parameters: Parameters) -> Iterator[None]:
    # backward would add to a gradient that the caller has
    kept = {name: p.grad for name, p in parameters.items()}
    for p in parameters.values():
        p.grad = None
    try:
        yield
    finally:
        for name, p in parameters.items():
            p.grad = kept[name]


def _backward(loss: Callable[[], torch.Tensor]) -> None:
    value = loss()
    if value.requires_grad:
        value.backward()


def _sums(parameters: Parameters, losses: Backwards, *, zeros: bool) -> dict[str, torch.Tensor]:
    """Accumulate all micro-batches from zeros or from None; return dense copies."""

    def dense(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to_dense().clone() if gradient.is_sparse else gradient.detach().clone()

    for p in parameters.values():
        p.grad = torch.zeros_like(p) if zeros else None
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    # both sums get the same random numbers: dropout is no difference between them
    with seeded(0, device):
        for loss in losses:
            _backward(loss)
    return {
        name: torch.zeros_like(p) if p.grad is None else dense(p.grad)
        for name, p in parameters.items()
    }


def _rewritten(parameters: Parameters, losses: Backwards) -> list[str]:
    """Return the parameters whose gradient changes in a backward that accumulates nothing."""
    for p in parameters.values():
        p.grad = None
    # the first backward gives its tensor to `.grad`; whoever writes into it later has kept it
    _backward(losses[0])
    watched = {
        name: p.grad
        for name, p in parameters.items()
        if p.grad is not None and not p.grad.is_sparse
    }
    for gradient in watched.values():
        gradient.fill_(_SENTINEL)
    for loss in losses[1:]:
        value = loss()
        if value.requires_grad:
            # autograd.grad hands gradients back and leaves every `.grad` alone, unless their memory
            # is shared
            torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    return [name for name, gradient in watched.items() if not bool((gradient == _SENTINEL).all())]


def _shared(parameters: Parameters, loss: Callable[[], torch.Tensor]) -> list[tuple[str, str]]:
    """Return the pairs of parameters whose gradients overlap in memory after a reset to None."""
    for p in parameters.values():
        p.grad = None
    _backward(loss)
    made = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    places = sorted(
        (*_extent(g), name) for name, g in made.items() if not g.is_sparse and g.numel()
    )
    # in order of their first bytes, two extents overlap where the later begins before the other ends
    return [
        (name, other)
        for (_, end, name), (start, _, other) in combinations(places, 2)
        if start < end
    ]


def _extent(gradient: torch.Tensor) -> tuple[int, int]:
    """Return the first byte's address and the one after the last byte's."""
    # strides may leave gaps: the extent reaches from the first byte to the last one, gaps included
    last = sum(
        (size - 1) * stride for size, stride in zip(gradient.shape, gradient.stride(), strict=True)
    )
    return gradient.data_ptr(), gradient.data_ptr() + (last + 1) * gradient.element_size()


Rows = npt.NDArray[np.float64]
_ROUNDING = 1e-12
"""Relative difference, of weights or between directions of gradients, that rounding in float64 explains."""


def diagnose_case(
    window: WindowReference, comparison: Comparison, epoch: int, *, alike: bool
) -> Diagnosis | None:
    """Name the fault of a wrong float64 gradient from that gradient alone.

    None where nothing is determined.

    Args:
        window: the window whose gradient is wrong, of a float64 case whose optimizer does not move
            the parameters.
        comparison: that gradient compared with the right one.
        epoch: the epoch of the step. The steps before it are right.
        alike: whether all of several ranks have that gradient.
    """
    if not np.isfinite(comparison.observed).all():
        return None
    gradients = _summed_gradients(window)
    if not np.isfinite(gradients).all():
        return None

    def diagnosed(part: slice) -> Diagnosis | None:
        return _diagnosed(
            window,
            epoch,
            gradients,
            comparison,
            part,
            alike=alike,
        )

    # all parameters together first: more elements determine more weights
    if whole := diagnosed(slice(0, len(comparison.observed))):
        return whole
    elements = {name: comparison.layout.elements(name) for name in wrong_and_right(comparison)[0]}
    by_weights = {name: diagnosed(part) for name, part in elements.items()}
    unread = not all(gradients[j].any() for j in window.members)
    values: Gradients = {name: p.detach().double() for name, p in window.model().named_parameters()}
    found = diagnose_elements(
        comparison, by_weights, some_unread=unread, parameters=window.reference.flat(values)
    )
    return with_second_names(found, window, comparison, list(elements))


def is_explained(
    window: WindowReference, comparison: Comparison, weights: Vector, *, only: Sequence[str] = ()
) -> bool:
    """Return whether weights of micro-batches, (B,), give an observed gradient.

    True where that cannot be told.

    Args:
        window: the window of that gradient.
        comparison: the gradient compared with the right one.
        weights: (B,): the weight of each micro-batch.
        only: the parameters that are looked at, all if empty.
    """
    if window.moved or window.reference.instance.case.dtype != "float64":
        return True
    gradients = _summed_gradients(window)
    if not np.isfinite(gradients).all() or not np.isfinite(comparison.observed).all():
        return True
    near = _weights_give(weights, gradients, comparison.observed, comparison.allowed)
    return all(
        near[comparison.layout.elements(name)].all() for name in only or comparison.layout.names
    )


def of_one_sign(
    found: Diagnosis, window: WindowReference, comparison: Comparison
) -> Diagnosis | None:
    """Return the diagnosis of wrong parameters with the elements of one sign of each micro-batch
    alone, or None.

    Args:
        found: the diagnosis, which may be right as well where few elements tell.
        window: the window whose gradient is wrong.
        comparison: that gradient compared with the right one.
    """
    if window.moved or window.reference.instance.case.dtype != "float64":
        return None
    wrong, _ = wrong_and_right(comparison)
    elements = np.concatenate(
        [np.arange(part.start, part.stop) for part in map(comparison.layout.elements, wrong)]
    )
    gradients = _summed_gradients(window)[list(window.members)][:, elements]
    right = comparison.expected[elements]
    total = gradients.sum(axis=0)
    pivot = int(np.argmax(np.abs(total)))
    if not total[pivot] or not np.isfinite(total).all():
        return None
    # the window's divisor, read where the sum is largest
    scale = right[pivot] / total[pivot]
    observed = comparison.observed[elements]
    allowed = comparison.allowed[elements]
    for sign, which in ((1, "positive"), (-1, "negative")):
        kept = np.where(np.sign(gradients) == sign, gradients, 0.0).sum(axis=0) * scale
        # a gradient of zeros has elements of neither sign
        if beyond(kept, 0, allowed) and within(kept, observed, 8 * allowed):
            text = f"of each micro-batch's gradient only the {which} elements are in the step's"
            one_sign = Diagnosis("partial-gradient", text)
            # few elements may have one sign by chance
            return (
                one_sign
                if np.count_nonzero(np.abs(right) > allowed) > 2
                else any_of([found, one_sign])
            )
    return None


def stolen_buffer(instance: Instance) -> Diagnosis | None:
    """Return the diagnosis of a model whose backward returns a buffer that it uses again, or None."""
    batches = [instance.batch(items) for items in instance.case.plan.cuts]
    try:
        found = find_stolen_buffers(
            instance.model(), instance.problem.loss, (2 * batches)[: max(2, len(batches))]
        )
    # a loss that fails twice in a row on one batch, as one that frees its own graph, is judged by
    # other means
    except RuntimeError:
        return None
    return found[0].diagnosis if found else None


def _summed_gradients(window: WindowReference) -> Rows:
    """Return (B, P): the gradient of each micro-batch's summed loss, at the parameters of the
    window.
    """
    instance = window.reference.instance
    model = window.model()
    rows = (
        gradients_of(instance, model, c, summed=True, dtype=torch.float64)
        for c in instance.case.plan.cuts
    )
    return np.stack([window.reference.flat(row) for row in rows])


def _diagnosed(
    window: WindowReference,
    epoch: int,
    gradients: Rows,
    comparison: Comparison,
    part: slice,
    *,
    alike: bool,
) -> Diagnosis | None:
    """Fit this window's micro-batches, then all of the epoch's.

    Name the fault where the weights are determined.
    """
    instance = window.reference.instance
    plan = instance.case.plan
    observed = comparison.observed[part]
    allowed = comparison.allowed[part]
    inside = list(window.members)
    everything = list(range(len(plan.micro_batches)))
    counts = [float(instance.count(instance.batch(plan.items(j)))) for j in everything]
    right = 1.0 if instance.problem.reduction == "sum" else 1.0 / sum(counts[j] for j in inside)
    # elements that rounding may hide are no evidence
    evident = (np.abs(gradients[:, part]).max(axis=0) * right > allowed) | (
        np.abs(observed) > allowed
    )
    gradients = gradients[:, part][:, evident]
    observed = observed[evident]
    allowed = allowed[evident]
    template = Weights(
        observed=np.zeros(len(everything)),
        counts=tuple(counts),
        window=tuple(inside),
        accumulation_steps=plan.accumulation_steps,
        epoch=epoch,
        reduction=instance.problem.reduction,
        items=plan.micro_batches,
        unread=frozenset(j for j in everything if not gradients[j].any()),
        windows=plan.windows,
        owners=plan.owners if plan.ranks else (),
        alike=alike,
    )
    # fewer unknowns first: the epoch's other micro-batches may be combinations of the window's own
    for members in (inside, everything):
        fit = fit_weights(observed, gradients[members], allowed)
        # a fit with a residual is a fault that is not of weights; one that is not unique is any
        # weights
        if not (fit.exact and fit.determined):
            continue
        values = np.zeros(len(everything))
        errors = np.zeros(len(everything))
        values[members] = fit.weights
        errors[members] = _errors(gradients[members], observed, allowed)
        weights = replace(
            template,
            # a weight that rounding does not tell from 0 is a missing micro-batch
            observed=np.where(np.abs(values) <= errors, 0.0, values),
            tolerance=max(_ROUNDING, float(errors.max() / right)),
        )
        # the sum is right up to rounding, and what is wrong is in elements that are no sum of the
        # micro-batches'
        if weights.is_right:
            return None
        diagnosis = diagnose(weights, _steps_before(weights))
        wrong = np.abs(observed - right * gradients[inside].sum(axis=0)) > allowed
        read = [j for j in members if j not in template.unread]
        # two of the window's weights that fit one pattern are no coincidence; one number may be
        # anything, and so may the weights of other windows
        is_told = members is inside and (len(read) > 1 or _is_named(weights, read))
        if names_nothing(diagnosis) or not (_is_checked(gradients[members], wrong) or is_told):
            break
        return diagnosis
    return _by_trial(template, gradients, observed, allowed)


def _is_checked(gradients: Rows, wrong: npt.NDArray[np.bool_]) -> bool:
    """Return whether a fit of micro-batches' gradients has more wrong elements than the unknowns
    that they decide: those left over check it.
    """
    decided = _rank(gradients) - _rank(gradients[:, ~wrong])
    return _has_more_elements(gradients[:, wrong], decided)


def _rank(gradients: Rows) -> int:
    """Return how many elements of (B, P) micro-batches' gradients are no combinations of others, as
    sums are.
    """
    sizes = np.linalg.norm(gradients, axis=0)
    return int(np.linalg.matrix_rank(gradients[:, sizes > 0] / sizes[sizes > 0], _ROUNDING))


def _has_more_elements(gradients: Rows, count: int) -> bool:
    """Return whether more than so many elements of the gradient are no multiples of each other.

    A multiple is no evidence: whatever rounds x to y rounds -x to -y and 2x to 2y.
    """
    rest = gradients[:, gradients.any(axis=0)]
    rest = rest / np.linalg.norm(rest, axis=0)
    for _ in range(count + 1):
        if not rest.size:
            return False
        # take one direction out with all its multiples, and see whether any other is left
        rest = rest[:, np.abs(rest[:, 0] @ rest) < 1 - _ROUNDING]
    return True


def _by_trial(
    template: Weights, gradients: Rows, observed: Vector, allowed: Vector
) -> Diagnosis | None:
    """Name the faults whose weights give this gradient, where there are too few elements to solve
    for the weights.

    The faults tried have no free number, so one element that agrees to rounding is no coincidence.
    """
    found: dict[str, Diagnosis] = {}
    for values in trial_weights(template):
        if _weights_give(values, gradients, observed, allowed).all():
            weights = replace(template, observed=values)
            diagnosis = diagnose(weights, _steps_before(weights))
            found |= {} if names_nothing(diagnosis) else {diagnosis.name: diagnosis}
    if not found or not len(observed):
        return None
    together = any_of(found.values())
    # one element fits many faults: a list of all of them helps nobody
    return together if len(together.names) <= MOST_NAMES else None


def _weights_give(
    weights: Vector, gradients: Rows, observed: Vector, allowed: Vector
) -> npt.NDArray[np.bool_]:
    """Return (P,): whether (B,) weights of micro-batches give each element of a gradient."""
    # each product rounds, as do those of the gradient itself
    mass = np.abs(weights[:, None] * gradients).sum(axis=0)
    rounding = 64 * np.finfo(np.float64).eps * mass
    near: npt.NDArray[np.bool_] = np.abs(weights @ gradients - observed) <= 2 * allowed + rounding
    return near


def _errors(gradients: Rows, observed: Vector, allowed: Vector) -> Vector:
    """Return (B,): how far rounding may take each fitted weight."""
    # weights = pseudoinverse times gradient, and so are their errors
    inverse = np.abs(np.linalg.pinv(gradients.T))
    eps = float(np.finfo(np.float64).eps)
    errors: Vector = 4 * inverse @ (allowed + eps * np.abs(observed))
    return errors


def _steps_before(weights: Weights) -> list[Weights]:
    """Return the steps before one, which were judged right."""
    found = []
    for epoch in range(weights.epoch + 1):
        for window in weights.windows:
            if epoch == weights.epoch and window == weights.window:
                break
            right = replace(weights, window=window, epoch=epoch)
            if not right.inside:
                continue
            values = np.zeros(len(weights.counts))
            values[right.inside] = right.expected
            found.append(replace(right, observed=values))
    return found


def _is_named(weights: Weights, read: Sequence[int]) -> bool:
    """Whether the only micro-batch that is read is right up to a factor that the run itself has."""
    (only,) = read
    factor = float(weights.observed[only] / weights.expected)
    return bool(factor_meanings([weights]) or any(constant_meaning(factor)))
