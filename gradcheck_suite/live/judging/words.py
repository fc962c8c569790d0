"""What a live run says of each fault of the sum, and what to do."""

from __future__ import annotations

SENTENCES = {
    "stale-window": "the gradient of an earlier step is still in it: reset the gradients once after every step",
    "no-gradient": "nothing of the window is in the gradient: it was reset between backward and the step",
    "reset-inside-window": "only the last backward passes of the window are in the gradient: "
    "reset once per window, not per micro-batch",
    "first-only": "only the window's first backward pass is in the gradient",
    "dropped-micro-batch": "some backward passes of the window are not in the gradient",
    "repeated-micro-batch": "a backward pass of the window is in the gradient twice",
    "running-loss": "earlier backward passes are in the gradient several times, as when the running sum of the losses "
    "goes backward each time: send each loss through once",
    "rescaled-accumulator": "the running sum itself is rescaled at every micro-batch; scale each contribution instead",
    "unrecognised-weights": "the backward passes of the window are not in the gradient once each",
    "not-linear": "the gradient is not a weighted sum of what arrived in the window: something else writes to `.grad` "
    "(clipping per micro-batch, noise, a shared buffer)",
    "hook": "a hook on a parameter changes the gradient of each micro-batch in a way that is no fixed factor of its "
    "elements (clipping, noise, normalization): do it once, to `.grad`, before the step",
    "foreign": "`.grad` still has the gradient of a backward pass that belonged to another optimizer's step: "
    "reset the gradients of this optimizer before its own backward passes",
    "step-per-micro-batch": "the optimizer steps after every micro-batch, where accumulation_steps = {steps}",
    "missing-gradient": "a parameter that the window reaches has no gradient at the step: "
    "look for what resets or replaces its `.grad`",
    "stale-parameters": "micro-batch(es) {numbers} of the window were computed with other parameters than those at the "
    "step: write to parameters between windows, not inside one",
    "moving-parameters": "another optimizer, which trains on the same passes, has made {steps} step(s) between "
    "the micro-batches of this window: let both step once per window",
    "mixed-modes": "micro-batch(es) {numbers} of the window were computed in another mode (train or eval) than the "
    "others: call model.train() after every evaluation",
    "nonlinear-backward": "the backward pass of {what} is no linear function of the gradient that it receives, so "
    "micro-batches do not add up to one batch (it ignores the gradient, clips or normalizes it)",
    "wrong-backward": "the backward of custom function {name} is wrong: {fault} of its forward (if that is on purpose, "
    "accept it with --accept wrong-backward)",
    "not-reduced": "only this rank's own gradient is in `.grad` at the step, not reduced over the ranks: run the "
    "forward and the backward of the window's last micro-batch outside no_sync",
    "tail-dropped": "{lost} micro-batch(es) went backward and were reset without a step: "
    "step after an epoch's last micro-batch too",
}

KNOWN = frozenset(SENTENCES) - {"hook", "foreign", "nonlinear-backward"} | {
    "mean-of-means",
    "wrong-count",
    "wrong-scale",
    "weighted-by-count",
    "rounded-weights",
    "unequal-factors",
    "tail-leak",
}
"""Every diagnosis of a live run: of the sum, and those that the weights of one window alone may show."""
