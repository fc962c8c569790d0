"""What a zero gradient does that None does not: one record for each optimizer of `torch.optim`.

An optimizer skips a parameter whose gradient is None. A zero gradient is a gradient: averages decay, counters rise, and
what is left of the momentum moves the parameter. A record names the optimizer and its two derivations. Everything else,
the table of the report included, follows from them. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gradcheck_suite.evidence.zero_or_none import recurrences, sums

Settings = Mapping[str, Any]
PLAIN, MOMENTUM, DECAY, DEFAULTS = "plain", "momentum", "weight decay", "torch's defaults"


@dataclass(frozen=True)
class Law:
    """One optimizer.

    Attributes:
        optimizer: name of the class in `torch.optim`.
        step: one step, as a recurrence.
        sums: the last of n steps, as sums over all gradients.
        zero: what one zero gradient does, as formulas.
        variants: name -> settings that differ from torch's defaults. Dyadic settings make more operations exact.
        decoupled: whether weight decay shrinks the parameter, and is no part of the gradient.
        decay: (step from 1, settings) -> factor by which the step shrinks the parameter; None for weight decay alone.
        sparse: whether it takes sparse gradients only. Zeroing leaves no element of such a gradient.
        reads_none_as_zero: whether None is not skipped.
        of: what is trained, where a parameter of that shape has another state: "vector"; "" for a matrix.
    """

    optimizer: str
    step: Callable[..., tuple[Any, dict[str, Any]]]
    sums: Callable[..., tuple[Any, dict[str, Any]]]
    zero: str
    variants: Mapping[str, Settings]
    decoupled: bool = False
    decay: Callable[[int, Settings], Any] | None = None
    sparse: bool = False
    reads_none_as_zero: bool = False
    of: str = ""

    @property
    def name(self) -> str:
        """The class, and the shape of the parameter where it has laws for several."""
        return f"{self.optimizer} of a {self.of}" if self.of else self.optimizer

    def is_decoupled(self, settings: Settings) -> bool:
        """Whether weight decay is no part of the gradient under these settings."""
        return bool(self.decoupled or settings.get("decoupled_weight_decay"))

    def factor(self, step: int, settings: Settings) -> Any:
        """Return the factor by which a step shrinks the parameter."""
        if self.decay is not None:
            return self.decay(step, settings)
        return 1 - settings["lr"] * settings["weight_decay"] if self.is_decoupled(settings) else 1


RATE = 2.0**-4
DYADIC = {"lr": RATE, "weight_decay": 0.0}
BETAS = {**DYADIC, "betas": (0.5, 0.75)}


def _variants(plain: Settings, momentum: Settings | None = None, **others: Settings) -> dict[str, Settings]:
    """Return variants: plain, with momentum and with weight decay where the optimizer has them, defaults, others."""
    found = {PLAIN: plain} | ({} if momentum is None else {MOMENTUM: {**plain, **momentum}})
    found |= {DECAY: {**plain, "weight_decay": 0.125}} if "weight_decay" in plain else {}
    found |= {} if plain is ORTHOGONAL else {DEFAULTS: {}}
    return found | {name: {**plain, **settings} for name, settings in others.items()}


HALF = {"momentum": 0.5}
ORTHOGONAL = {**DYADIC, **HALF, "ns_coefficients": (1.5, -0.5, 0.0), "ns_steps": 1}
"""Settings under which Muon's iteration, which runs in bfloat16, is exact on small dyadic orthogonal matrices."""
ADAFACTOR = Law(
    "Adafactor", recurrences.adafactor, sums.adafactor, "R, C <- (1 - step^beta2_decay) R, C, step + 1",
    _variants(DYADIC), decoupled=True)  # fmt: skip
LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law("Adadelta", recurrences.adadelta, sums.adadelta, "v <- rho v, u <- rho u, step + 1",
            _variants({**DYADIC, "rho": 0.75})),
        ADAFACTOR,
        replace(ADAFACTOR, zero="V <- (1 - step^beta2_decay) V, step + 1", of="vector"),
        Law("Adagrad", recurrences.adagrad, sums.adagrad, "step + 1, which lr_decay reads",
            _variants({**DYADIC}, falling={"lr_decay": 0.5}, filled={"initial_accumulator_value": 0.5})),
        Law("Adam", recurrences.adam, sums.adam,
            "m <- beta1 m, v <- beta2 v, step + 1; p - lr m' / (sqrt(v') + eps), of the corrected m and v",
            _variants(BETAS, amsgrad={"amsgrad": True}, maximize={"maximize": True, "weight_decay": 0.125})),
        Law("AdamW", recurrences.adam, sums.adam,
            "as Adam, after p <- (1 - lr weight_decay) p",
            _variants(BETAS, amsgrad={"amsgrad": True})),
        Law("Adamax", recurrences.adamax, sums.adamax,
            "m <- beta1 m, u <- max(beta2 u, eps), step + 1; p - lr m / ((1 - beta1^step) u)", _variants(BETAS)),
        Law("ASGD", recurrences.asgd, sums.asgd,
            "p <- (1 - lambd eta) p, ax <- ax + mu (p - ax); eta and mu fall, step + 1",
            _variants({**DYADIC, "lambd": 0.5}, averaged={"t0": 1.0}),
            decay=lambda step, s: 1 - s["lambd"] * sums.asgd_rate(step, s)),
        Law("LBFGS", recurrences.lbfgs, sums.lbfgs,
            "a zero in the flat gradient, as None is: p moves along the direction of all parameters",
            {PLAIN: {"lr": 0.5, "max_iter": 1}, DEFAULTS: {"max_iter": 1}}, reads_none_as_zero=True),
        Law("Muon", recurrences.muon, sums.muon,
            "b <- momentum b; p - lr O(b), where O drives the singular values towards 1, however small b is",
            _variants(ORTHOGONAL, standard={"nesterov": False}), decoupled=True),
        Law("NAdam", recurrences.nadam, sums.nadam,
            "m <- beta1 m, v <- beta2 v, mu_product and step go on; p - lr mu m' / (sqrt(v') + eps)",
            _variants(BETAS, decoupled={"decoupled_weight_decay": True, "weight_decay": 0.125})),
        Law("RAdam", recurrences.radam, sums.radam,
            "m <- beta1 m, v <- beta2 v, step + 1; p - lr m', rectified and over sqrt(v) + eps later on",
            _variants({**BETAS, "betas": (0.5, 0.9375)},
                      decoupled={"decoupled_weight_decay": True, "weight_decay": 0.125})),
        Law("RMSprop", recurrences.rmsprop, sums.rmsprop,
            "v <- alpha v, step + 1; with momentum b <- momentum b, p - lr b",
            _variants({**DYADIC, "alpha": 0.75}, HALF, centered={"centered": True, **HALF})),
        Law("Rprop", recurrences.rprop, sums.rprop,
            "prev <- 0, step + 1: the next gradient counts as one whose sign has not turned", {
                PLAIN: {"lr": RATE, "etas": (0.5, 1.25), "step_sizes": (0.03125, 0.25)}, DEFAULTS: {}}),
        Law("SGD", recurrences.sgd, sums.sgd, "with momentum b <- momentum b, p - lr b",
            _variants(DYADIC, HALF, nesterov={**HALF, "nesterov": True},
                      dampened={**HALF, "dampening": 0.25, "weight_decay": 0.125},
                      maximize={**HALF, "maximize": True})),
        Law("SparseAdam", recurrences.sparse_adam, sums.sparse_adam,
            "step + 1 alone: a zeroed sparse gradient has no element",
            {PLAIN: {"lr": RATE, "betas": (0.5, 0.75)}, DEFAULTS: {}}, sparse=True),
    )
}  # fmt: skip
"""The record of each optimizer by the name of its class; Adafactor has a second one, of a vector."""
