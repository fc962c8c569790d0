"""JAX's opinion on a live run: the recorded calls of one window, over the bridge, in float64.

The calls of small models are copied when their window is computed again, and JAX is asked when the
run is over: training goes on undisturbed, and JAX is not imported before. The gradients that
reached a module's outputs are recorded, so the sum of their products with the outputs is a loss
whose gradient both frameworks compute. Custom functions keep their own backward there:
`custom_functions` judges it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from gradcheck_suite.auditing.module_calls import (
    ReplayOptions,
    ReplayResult,
    discarded_output,
    is_differentiable,
    leaves_of,
    replay,
)
from gradcheck_suite.auditing.program_state import unchanged
from gradcheck_suite.auditing.recomputation import RecordedCall, add_gradients, exceeding, norm

if TYPE_CHECKING:
    from gradcheck_suite.bridge import Lowered

MOST_PARAMETERS = 1_000_000
"""Elements of a model's parameters above which JAX is not asked: their copy in float64 takes 8 MB."""
BUDGET_S = 20.0
"""Seconds after which JAX is asked about no further call."""
RESOLUTION = 2.0**-26
NARROW_RESOLUTION = 2.0**-10
"""Share of a parameter's gradient below which a difference is none: in float64, and where the model itself asks for
float32 inside. Rounding is 2^-53 and 2^-24; a wrong derivative is larger."""
RESOLUTION_OF_ALL = 2.0**-40
"""The same as a share of the gradient of all parameters, for a parameter whose own gradient cancels to zero."""


class _Refused(Exception):
    """Why JAX is not asked about a call."""


@dataclass
class JaxOpinion:
    """What JAX said of a window.

    Attributes:
        calls: number of recorded calls.
        answered: number of these whose gradient JAX computed.
        refusal: why JAX could not compute the first of the others, or None.
        findings: parameters whose gradients differ, one sentence for each call.
    """

    calls: int = 0
    answered: int = 0
    refusal: str | None = None
    findings: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Return a sentence."""
        if not self.answered:
            return f"JAX gives no second opinion: {self.refusal or 'no window was computed again'}"
        text = f"JAX gave a second opinion on {self.answered} of {self.calls} calls of one window"
        if not self.findings:
            text += ", and agrees with torch"
        return (
            text
            if self.refusal is None
            else f"{text}; the first call that it could not compute: {self.refusal}"
        )


def _float64(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (
        value.detach().clone().to(torch.float64)
        if value.is_floating_point()
        else value.detach().clone()
    )


def kept_calls(parts: Sequence[RecordedCall]) -> list[RecordedCall] | str:
    """Return copies of a window's calls, or why there are none: in float64, of the modules too,
    without autocast.
    """
    copies: dict[int, torch.nn.Module] = {}
    kept = []
    for part in parts:
        forward = part.forward
        size = sum(p.numel() for p in forward.module.parameters())
        if size > MOST_PARAMETERS:
            return (
                f"the model has {size:,} parameters, and JAX computes only models of at most"
                f" {MOST_PARAMETERS:,}"
            )
        # one copy for all calls of a module
        if id(forward.module) not in copies:
            try:
                # JAX is asked when the run is over, and the parameters have moved by then
                copies[id(forward.module)] = copy.deepcopy(forward.module).double()
            except Exception as error:
                return f"the model cannot be copied: {type(error).__name__}: {error}"
        wide = replace(
            forward,
            module=copies[id(forward.module)],
            arguments=[_float64(value) for value in forward.arguments],
            # it would cast float64 down
            autocast=(forward.autocast[0], forward.autocast[1], False),
        )
        kept.append(
            RecordedCall(wide, {i: _float64(g) for i, g in part.cotangents.items()}, part.index)
        )
    return kept


def ask_jax(calls: Sequence[RecordedCall]) -> JaxOpinion:
    """Compare the gradients of calls by torch and by JAX, both in float64."""
    opinion = JaxOpinion(len(calls))
    began = time.perf_counter()
    for call in calls:
        # tracing takes seconds for a deep model: one answer is waited for, more are not
        if opinion.answered and time.perf_counter() - began > BUDGET_S:
            break
        try:
            with discarded_output():
                finding = _compare(call)
        except _Refused as error:
            opinion.refusal = opinion.refusal or str(error)
        except Exception as error:
            opinion.refusal = (
                opinion.refusal or f"{type(error).__name__}: {str(error).splitlines()[0]}"
            )
        else:
            opinion.answered += 1
            if finding:
                opinion.findings.append(finding)
    return opinion


def _compare(call: RecordedCall) -> str | None:
    """Return what differs, or None.

    Raises:
        _Refused: the call draws random numbers.
        BridgeError: the model cannot be translated.
    """
    found = _by_torch(call, None)
    if found.random:
        raise _Refused("the model draws random numbers, which JAX draws differently")
    if found.functions and _by_torch(call, None).functions != found.functions:
        # JAX would be given the backward of a class that the next forward does not use
        raise _Refused(
            "the class of a custom function is made anew in each forward, so its own backward is"
            " not taken"
        )
    with unchanged(call.forward.module):
        gradients, narrow = _by_jax(call, found.functions)
    names = {id(p): name for name, p in call.forward.module.named_parameters()}
    total = sum(norm(g) ** 2 for g in found.gradients.values()) ** 0.5
    share = NARROW_RESOLUTION if narrow else RESOLUTION
    off = {
        key: norm(add_gradients(g.cpu(), -gradients[names[key]]))
        for key, g in found.gradients.items()
    }
    allowed = {
        key: share * norm(g) + RESOLUTION_OF_ALL * total for key, g in found.gradients.items()
    }
    wrong = exceeding(off, allowed, found.gradients, lambda seed: _by_torch(call, seed).gradients)
    if not wrong:
        return None
    worst = max(wrong, key=wrong.__getitem__)
    size = norm(found.gradients[worst])
    relative = (
        f"by {off[worst] / size:.2g} of its size"
        if size
        else f"by {off[worst]:.2g}, where torch's is 0"
    )
    others = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return (
        f"torch and JAX differ in the gradient of {names[worst]} {relative}{others}, both in"
        f" float64, in a call of {type(call.forward.module).__name__} in micro-batch {call.index}:"
        " no loop is to blame"
    )


def _by_torch(call: RecordedCall, seed: int | None) -> ReplayResult:
    return replay(
        call.forward, call.forward.arguments, call.cotangents, ReplayOptions(seed=seed, scale=1.0)
    )


def _by_jax(call: RecordedCall, functions: frozenset[type]) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the gradients by name, and whether the model asks for less than float64 inside.

    Args:
        call: the call.
        functions: custom functions whose own backward is taken.
    """
    from gradcheck_suite.bridge import arguments_of, lower

    model = call.forward.module
    structure = call.forward.structure
    # as the modules were at the call, and not as they were when they were copied
    for part, training in zip(model.modules(), call.forward.modes, strict=True):
        part.training = training
    positional, keywords = pytree.tree_unflatten(call.forward.arguments, structure)
    places = [
        i
        for i, leaf in enumerate(leaves_of(model(*positional, **keywords)))
        if is_differentiable(leaf)
    ]

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        positional, keywords = pytree.tree_unflatten(list(batch["arguments"]), structure)
        outputs = leaves_of(model(*positional, **keywords))
        products = [
            (outputs[places[i]] * gradient).sum() for i, gradient in batch["gradients"].items()
        ]
        return torch.stack(products).sum()

    batch = {"arguments": call.forward.arguments, "gradients": call.cotangents}
    lowered: Lowered = lower(
        model,
        loss,
        batch,
        own_backwards=functions,
    )
    _, gradients, _ = lowered.value_and_gradient(*arguments_of(model, batch))
    return {name: torch.from_numpy(g.copy()) for name, g in gradients.items()}, bool(lowered.narrow)
