"""The one table of faults: what each name means, what to do, by which evidence it is recognised.

Console, JSON, `--accept`, report, audit and the documents' tables read it. What a loop did is a
sentence of the predicate that has the numbers; what to do about it stands here alone, for the fault
or for one of its causes. To add a fault: a row here, and its predicate in `judge`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

EvidenceKind = Literal[
    "weights", "elements", "sizes", "inputs", "steps", "state", "outcome", "problem"
]
"""What a name is read off: weights of micro-batches, elements of parameters, sizes of gradients, inputs of losses, the
micro-batches of steps, parameters and the optimizer's state, how the loop ended, the objective."""


@dataclass(frozen=True)
class Remedy:
    """What to do, in the imperative.

    Attributes:
        torch: for a loop of PyTorch.
        jax: for a loop of JAX; None where it is the same.
        ranks: what follows the text where there are several ranks or devices.
    """

    torch: str
    jax: str | None = None
    ranks: str = ""


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: the name of the fault, in every command.
        kind: the part of the contract that it violates; a fault of gradients may also show as NaN
            or as None.
        meaning: what the loop does, in about ten words; the first line of a verdict whose own
            sentence is longer.
        remedy: what to do.
        evidence: the evidence by which it is recognised.
        causes: what may cause it -> a remedy for that cause, in place of the general one.
        general: whether the name says no more than that something is wrong, or where.
        command: `verify` or `audit` where one alone finds it; empty for both.
    """

    name: str
    kind: str
    meaning: str
    remedy: Remedy
    evidence: EvidenceKind
    causes: Mapping[str, Remedy] = field(default_factory=dict)
    general: bool = False
    command: str = ""


def _gradient_fault(
    name: str,
    evidence: EvidenceKind,
    meaning: str,
    remedy: str,
    *,
    jax: str | None = None,
    ranks: str = "",
    **more: Any,
) -> Fault:
    return Fault(
        name,
        "gradient",
        meaning,
        Remedy(remedy, jax, ranks),
        evidence,
        **more,
    )


def _steps_fault(
    name: str, meaning: str, remedy: str, *, jax: str | None = None, **more: Any
) -> Fault:
    return Fault(
        name,
        "step-count",
        meaning,
        Remedy(remedy, jax),
        "steps",
        **more,
    )


def _parameters_fault(name: str, meaning: str, remedy: str, **more: Any) -> Fault:
    # an audit does not follow what moves a parameter between steps, and so finds few of these
    own = {"jax": None, "command": "verify", **more}
    jax = own.pop("jax")
    return Fault(
        name,
        "parameters",
        meaning,
        Remedy(remedy, jax),
        "state",
        **own,
    )


_ROWS = (
    _gradient_fault(
        "mean-of-means",
        "weights",
        "every mean has the same weight, whatever its count",
        "divide each micro-batch's summed loss by the number of targets in the whole window",
        ranks=", added up over all ranks or devices",
        causes={"sum": Remedy("do not divide a summed loss by the micro-batch's count")},
    ),
    _gradient_fault(
        "wrong-count",
        "weights",
        "means are weighted by something other than their counts, such as items or rounded counts",
        "divide each summed loss by the window's count, or weight each mean by its own count"
        " over it",
        causes={"running": Remedy("begin to count anew after each step")},
    ),
    _gradient_fault(
        "wrong-scale",
        "weights",
        "every item of the window, or of one rank, has the same wrong weight",
        "divide each summed loss by the window's count, once; check that no library divides a"
        " second time",
        causes={
            "not-divided": Remedy(
                "a division is missing: divide each summed loss by the window's count"
            ),
            "divided-twice": Remedy(
                "divide each summed loss by the window's count, and by nothing else"
            ),
            "short-window": Remedy(
                "divide a short window by its own number or count, not by that of a whole one"
            ),
            "long-window": Remedy(
                "step and reset after each whole window: look at what decides when to step"
            ),
            # DistributedDataParallel divides by the number of ranks, whatever each of them counts:
            # https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
            "ranks": Remedy(
                "divide each rank's summed loss by the count of all ranks; where gradients are"
                " averaged over ranks (DistributedDataParallel, fully_shard), multiply it by the"
                " number of ranks",
                jax=(
                    "add sums and counts up over all devices with `psum`, and divide once; `pmean`"
                    " is right for means of equal counts alone"
                ),
            ),
            # a replicated parameter is broadcast to the devices, and the transpose of a broadcast
            # is a sum: https://docs.jax.dev/en/latest/notebooks/shard_map.html
            "summed-by-jax": Remedy(
                "under `shard_map` with `check_vma` (the default), `jax.grad` by replicated"
                " parameters has added the gradients up over the devices, and `pmean` after it"
                " changes nothing: take the `pmean` of the loss inside of the differentiated"
                " function, or divide by the number of devices"
            ),
            # where JAX does not track what varies over devices, the transpose of `psum` is `psum`
            "summed-loss": Remedy(
                "without `check_vma`, and under `pmap`, JAX multiplies the gradient of a loss that"
                " is a `psum` by the number of devices: average the gradients with `pmean`, or leave"
                " the `psum` out of the differentiated function"
            ),
            "one-rank": Remedy(
                "look for what a rank does to its losses or gradients before they are added up"
            ),
            "items": Remedy("divide by `run.count(batch)`, which is not the number of items"),
            "extra-target": Remedy(
                "one target too many is counted for every item: count the targets that are not"
                " ignored"
            ),
            "ignored-targets": Remedy("let a micro-batch without valid targets count 0"),
            # `count.clamp(min=1)` is the usual guard against a division by 0
            "at-least-1": Remedy(
                "do not raise a count to 1: a micro-batch without valid targets counts 0, and a sum"
                " of class weights may be below 1"
            ),
            "rounded-count": Remedy(
                "do not round a count: a sum of class weights may be a fraction"
            ),
            "other-count": Remedy(
                "divide by the count of the micro-batches whose gradients are in this step, of all"
                " ranks"
            ),
            "running-count": Remedy("set the count to 0 when a window begins"),
            "off-by-one": Remedy(
                "count the targets that the loss divides by, not one more or less"
            ),
            "equal-counts": Remedy(
                "add up the counts of the window's micro-batches: they are not all alike"
            ),
            "sign": Remedy("subtract where you add, or maximise the right quantity"),
            "loss-scale": Remedy("unscale the gradients once before the step"),
            "not-scaled": Remedy(
                "give each loss of the window to `scaler.scale` before its backward",
                "multiply each loss of the window by the scale",
            ),
            "growing": Remedy(
                "look for something that is applied once more in every step, such as a hook that is"
                " registered anew and never removed",
                "look for something that is applied once more in every step, such as a factor that"
                " stays in a state",
            ),
            "constant": Remedy("look for a constant, such as a number of ranks or a coefficient"),
            "varying": Remedy(
                "look for a coefficient, a schedule, a hook, or a count that other windows take"
                " part in",
                "look for a coefficient, a schedule, or a count that other windows take part in",
            ),
        },
    ),
    _gradient_fault(
        "weighted-by-place",
        "weights",
        "an item's weight depends on the place of its micro-batch in the window",
        "weight each micro-batch by its count alone; look for a schedule, a loss scale or an index"
        " in the loss, or a special case for the first or last micro-batch",
        causes={
            "sign": Remedy(
                "send the losses of all micro-batches backward with the same sign",
                "differentiate the losses of all micro-batches with the same sign",
            )
        },
    ),
    _gradient_fault(
        "weighted-by-loss",
        "sizes",
        "an item's weight depends on the value of its micro-batch's loss",
        "look for a power, a logarithm, a focal weight or a scale that is computed from the loss",
        command="verify",
    ),
    _gradient_fault(
        "rescaled-accumulator",
        "weights",
        "each micro-batch weighs a constant factor times the one before it",
        "scale each contribution by the same number, and not the accumulated gradient; keep a loss"
        " scale for the whole window; add up over ranks once per window, after its last micro-batch",
    ),
    _gradient_fault(
        "repeated-micro-batch",
        "weights",
        "some micro-batches are in the gradient more than once",
        "call backward once per micro-batch, on its own loss and not on the running sum; look for"
        " closures that read a loop's variable late, and for losses that are multiplied",
        jax=(
            "differentiate each loss once, and not the running sum; look for closures that read a"
            " loop's variable late, and for losses that are multiplied"
        ),
        causes={
            # autograd adds to a leaf as soon as its gradient is there: what was reached before the
            # exception stays
            "exception": Remedy(
                "where an exception of backward is caught, reset the gradients and begin the window"
                " anew: a part of the micro-batch has arrived"
            ),
            "begun-anew": Remedy(
                "reset the gradients before a window is begun anew, as after an exception"
            ),
        },
    ),
    _gradient_fault(
        "dropped-micro-batch",
        "weights",
        "some micro-batches of the window are missing from the gradient",
        "look for a `continue`, a `break` or a reset between them, an iterator that is advanced"
        " twice, and for what is chosen by chance, by size or by value",
        causes={
            # equal micro-batches are one element of a set
            "duplicates": Remedy("look for a set, a cache, or a comparison of batches or losses")
        },
    ),
    _gradient_fault(
        "reset-inside-window",
        "weights",
        "a reset inside the window leaves only the micro-batches after it in the gradient",
        "reset once per window, not once per micro-batch; add to the gradient instead of"
        " setting it",
    ),
    _gradient_fault(
        "first-only",
        "weights",
        "the gradient contains only the window's first micro-batch",
        "look for what excludes later ones: a flag, a `no_sync`, a detached graph",
        jax=(
            "look for what excludes later ones: a flag, a carry that is not handed on,"
            " `stop_gradient`"
        ),
    ),
    _gradient_fault(
        "no-gradient",
        "weights",
        "the gradient contains nothing of the window, or is None for a parameter that its items"
        " reach",
        "do not reset between backward and step; look for a loss that is not sent backward, a"
        " `no_grad`, and for a parameter that is frozen, replaced or reset to None",
        jax=(
            "do not start a new sum between the last gradient and the step; look for a"
            " `stop_gradient`"
        ),
        causes={
            "by-value": Remedy(
                "look for what sets a gradient to None or leaves it out by its value"
            )
        },
        general=True,
    ),
    _gradient_fault(
        # `no_sync` must be around the forward, as its documentation says: the reducer is prepared
        # there
        "not-reduced",
        "weights",
        "the gradient lacks micro-batches of some ranks",
        "add up gradients of all ranks once, after the last backward of the window: look for a"
        " forward under `no_sync` (DistributedDataParallel decides in the forward whether backward"
        " reduces), a rank that leaves out its all-reduce or does not wait for it, a broadcast or a"
        " reduce in place of an all-reduce, a process group without some ranks, the same batches on"
        " all ranks (`DistributedSampler` gives each its own)",
        causes={
            "same-data": Remedy(
                "give each rank micro-batches of its own: `DistributedSampler`, or the loader's"
                " share by rank and world size; and do not broadcast batches"
            )
        },
        jax=(
            "add gradients up over all devices with `psum`, or average them with `pmean`, before the"
            " update"
        ),
    ),
    _gradient_fault(
        "stale-window",
        "weights",
        "the gradient contains its own window and something of earlier ones",
        "reset once after every step, including that of the short last window; in a closure, reset"
        " at its start",
        causes={
            "average": Remedy(
                "reset once after every step, and leave moving averages to the optimizer"
            ),
            "sent-again": Remedy(
                "send each micro-batch backward in its own window alone; look for a list that keeps"
                " batches or losses over the step"
            ),
            "other-optimizer": Remedy(
                "reset the gradients of this optimizer before its own backward passes"
            ),
            # Megatron and other frameworks add up in float32 beside `.grad`
            "buffer": Remedy(
                "zero what the program adds gradients up in, such as `main_grad`, after every step"
            ),
            # `zero_grad` sets to None by default, and leaves the old tensor to whoever has kept it
            "handed-over": Remedy(
                "hand `.grad` over at every step: after `zero_grad` the next backward makes a new"
                " tensor"
            ),
        },
    ),
    _gradient_fault(
        "other-window",
        "weights",
        "the gradient contains micro-batches of another window in place of its own, or of a"
        " later one",
        "train the windows in the loader's order, each once; read gradients after they have been"
        " computed or communicated, and send a micro-batch backward after the step of the window"
        " before it",
        jax=(
            "train the windows in the order of `run.batches`, each once; read gradients after they"
            " have been computed, and differentiate a micro-batch after the step of the window"
            " before it"
        ),
    ),
    _gradient_fault(
        "wrong-windows",
        "weights",
        "windows begin and end at other micro-batches than they should",
        "step after K micro-batches and after the last one of every epoch, where `(i + 1) % K =="
        " 0`, and begin anew in every epoch; look at the counter that decides when to step; a loop"
        " without a short window assumes `whole-windows`",
    ),
    _gradient_fault(
        "unequal-items",
        "weights",
        "items of the same micro-batch have different weights",
        "look for a custom loss that weights its items",
        general=True,
        causes={"parts": Remedy("divide each part's summed loss by the window's count")},
    ),
    _gradient_fault(
        "unrecognised-weights",
        "weights",
        "micro-batches have wrong weights that fit no known fault",
        "look for what gives each micro-batch its printed weight",
        general=True,
    ),
    _gradient_fault(
        "low-precision",
        "elements",
        "counts, weights or gradients are rounded to a narrower dtype than the parameter's",
        "compute counts, quotients and sums in the parameter's dtype or a wider one; if autocast"
        ' is meant, declare it: `--autocast DTYPE` or `@training_loop(autocast="bfloat16")`; do not'
        " quantise gradients",
    ),
    _gradient_fault(
        "changed-batch",
        "inputs",
        "a loss is computed from other items or values than the loader yields",
        "look for what changes batches before they reach the loss: a normalization in place,"
        " augmentation, truncation, padding, targets shifted against inputs",
        causes={
            "written": Remedy(
                "write the next batch to other memory, or when the backward has ended: torch does"
                " not know of what numpy or `.data` write"
            )
        },
    ),
    _gradient_fault(
        "wrong-mode",
        "inputs",
        "losses are computed in eval mode, all of them or some",
        "call `model.train()` after an evaluation",
    ),
    _gradient_fault(
        "other-parameters",
        "inputs",
        "losses are computed at other parameters than those that the step changes",
        "look for a copy or an average of the model, and for perturbed or rounded parameters",
        command="verify",
    ),
    _gradient_fault(
        "stale-parameters",
        "inputs",
        "losses are computed at parameters of an earlier step, or parameters change inside the"
        " window",
        "look for a copy of the model that is not updated, a forward that runs before the previous"
        " step, a step or an edit of parameters inside the window",
        jax=(
            "look for parameters that a compiled function closes over, a gradient that is computed"
            " before the previous step, a step or an edit of parameters inside the window"
        ),
        causes={
            # autocast keeps the casts of parameters until its outermost context is left, whatever
            # steps happen inside: https://docs.pytorch.org/docs/stable/amp.html
            "casts": Remedy(
                "enter autocast anew for each forward, or call `torch.clear_autocast_cache()` after"
                " the step"
            ),
            "written": Remedy("write to parameters when the backward has ended"),
            "between-passes": Remedy(
                "write to parameters when the window's last backward has ended, not between its"
                " micro-batches, nor between a forward and its backward, also where the values are"
                " put back; where the gradient at the other values is meant alone (sharpness-aware"
                " minimization), reset the gradients before its passes"
            ),
        },
    ),
    _gradient_fault(
        "misplaced-gradient",
        "elements",
        "a gradient has the right elements at the wrong places, or those of another parameter",
        "match parameters by name; look for an index, a gather or a reshape; go through the"
        " parameters in the same order on every rank",
    ),
    _gradient_fault(
        "partial-gradient",
        "elements",
        "some elements of a parameter's gradient are right and others wrong",
        "look for a slice, a mask, a shard, a clamp or a threshold, and for a copy in which tied"
        " parameters are two",
        general=True,
        command="verify",
    ),
    _gradient_fault(
        "not-summed",
        "elements",
        "gradients of micro-batches or ranks are combined by something other than their sum",
        "add up their gradients; over ranks with `ReduceOp.SUM`",
        command="verify",
    ),
    _gradient_fault(
        "projected-gradient",
        "elements",
        "the gradient is centred, projected, or replaced by a mean",
        "do so inside the optimizer, if at all",
        command="verify",
    ),
    _gradient_fault(
        "clipped",
        "sizes",
        "large gradients are too small, and small ones are right",
        "clip once, after the window's last micro-batch; switch it off for the verification",
        causes={"in-audit": Remedy("clip once, after the window's last micro-batch")},
    ),
    _gradient_fault(
        "normalised",
        "sizes",
        "the gradient does not change with the size of the loss",
        "do not divide the gradient by its size or reduce it to signs",
        command="verify",
    ),
    _gradient_fault(
        "added-term",
        "sizes",
        "something that does not scale with the loss is added to the gradient: decay, a penalty,"
        " noise",
        "leave decay to the optimizer; make a penalty part of the objective; switch noise off for"
        " the verification",
        command="verify",
    ),
    _gradient_fault(
        "skipped-by-size",
        "sizes",
        "micro-batches, windows or elements are left out by the size of their loss or gradient",
        "switch off what skips them; give a `GradScaler` a smaller `init_scale`; look for a"
        " threshold, a sparse communication, a format with a narrow exponent",
        jax=(
            "switch off what skips them; look for a threshold, a sparse communication, a format"
            " with a narrow exponent"
        ),
        command="verify",
    ),
    _gradient_fault(
        "overflow",
        "sizes",
        "a large gradient becomes infinite or NaN",
        "look for a square, a product or a coarser dtype",
        command="verify",
    ),
    _gradient_fault(
        "skipped-non-finite",
        "sizes",
        "micro-batches or windows with infinite or NaN gradients are left out, or such elements"
        " replaced",
        "use a `GradScaler`, or assume `finite-gradients`; remove `nan_to_num` or the clamp: it"
        " hides that the run diverged",
        jax=(
            "assume `finite-gradients` if that is meant; remove `nan_to_num` or the clamp: it hides"
            " that the run diverged"
        ),
        causes={
            "no-targets": Remedy("leave out that micro-batch alone, or add it"),
            "not-reset": Remedy(
                "reset the gradients also where the step is left out; use a `GradScaler`, or assume"
                " `finite-gradients`",
                "begin a new sum also where the step is left out, or assume `finite-gradients`",
            ),
        },
        command="verify",
    ),
    _gradient_fault(
        "poisoned-by-earlier-window",
        "sizes",
        "the gradient contains a NaN or an infinity of an earlier window",
        "reset with `zero_()` or None, never by multiplying: 0 * NaN is NaN",
        jax="start at new zeros, never by multiplying: 0 * NaN is NaN",
        command="verify",
    ),
    _gradient_fault(
        # with `.grad` None, autograd keeps the tensor that backward returned, and copies nothing:
        # https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/functions/accumulate_grad.h
        "stolen-buffer",
        "elements",
        "a gradient shares memory with a buffer that backward writes again, or with another"
        " gradient",
        "return a new tensor (`buffer.clone()`) from that backward, or allocate `.grad` as zeros"
        " before the first backward and reset with `zero_`",
    ),
    _gradient_fault(
        "wrong-backward",
        "elements",
        "the backward of a `torch.autograd.Function`, or of a checkpoint, is not the derivative of"
        " its forward",
        "fix its backward, let a checkpoint preserve the random state, or accept it with `--accept"
        " wrong-backward` if it is meant, as a straight-through estimator is",
        jax=(
            "fix the backward of the `jax.custom_vjp`, or accept it with `--accept wrong-backward`"
            " if it is meant"
        ),
        causes={
            "written": Remedy(
                "write to what a checkpoint reads when the backward has ended, or give it to the"
                " checkpoint as an argument"
            )
        },
        command="audit",
    ),
    _gradient_fault(
        "not-repeatable",
        "outcome",
        "the loop gives another gradient when it runs again on the same case",
        "start anew in every run: no global counter, cache or iterator, no `id` of batches that are"
        " freed; draw from torch's generator alone",
        jax=(
            "start anew in every run: no global counter, cache or iterator; draw from keys with"
            " seeds of their own"
        ),
        command="verify",
    ),
    _gradient_fault(
        "plain-accumulation",
        "elements",
        "gradients of micro-batches are added up, but the objective is a function of the whole"
        " window",
        "compute it for the window's items together, or cache what they share (GradCache)",
        command="verify",
    ),
    _gradient_fault(
        "not-linear",
        "elements",
        "the gradient is not a weighted sum of those of the micro-batches, and no other fault fits",
        "switch off clipping and noise; check hooks, custom backwards, buffers and casts",
        jax="switch off clipping and noise; check each `custom_vjp`, buffers and casts",
        general=True,
        causes={
            "between-passes": Remedy("change `.grad` once, after the window's last backward pass"),
            "module-hook": Remedy(
                "let the modules' backward hooks return None, or remove them: what a hook returns"
                " replaces the gradient of every layer before it"
            ),
        },
    ),
    _steps_fault(
        "step-per-micro-batch",
        "the optimizer, its scheduler or its `GradScaler` steps once per micro-batch",
        "step once per window; a schedule that is meant to count micro-batches assumes"
        " `schedules-micro-batches`",
        causes={
            "scaler": Remedy("unscale, step and update once per window, after its last backward")
        },
    ),
    _steps_fault(
        "tail-dropped",
        "the short last window has no step, so its items never train the model",
        "step after the last micro-batch of an epoch too, or assume `whole-windows`",
        causes={"in-audit": Remedy("step after the last micro-batch of an epoch too")},
    ),
    _steps_fault(
        "tail-leak",
        "the short last window has no step, and its gradient leaks into the next epoch's first"
        " window",
        "step after the last micro-batch of an epoch too, and reset after it",
    ),
    _steps_fault(
        "dropped-window",
        "some windows have no step",
        "look for a warm-up, or a range that ends early",
        causes={
            "ranks": Remedy(
                "let a rank that has run out of micro-batches add zeros, until no rank has any left"
            ),
            "ignored-targets": Remedy(
                "step also where the window's last micro-batch has no valid targets: look for a"
                " `continue`"
            ),
        },
        command="verify",
    ),
    _steps_fault(
        "never-stepped",
        "`run.optimizer` was never stepped",
        "step `run.optimizer`, or wrap it, and no copy or other optimizer",
        jax="update by `run.optimizer`, or wrap it, and use the result",
        command="verify",
    ),
    _steps_fault(
        "repeated-step",
        "a window is stepped several times, or a step comes right after a reset",
        "step once, where a window has been accumulated; look for a library that steps as well",
        causes={
            # on a gradient of zeros, momentum and decay still move a parameter
            "zeros": Remedy("step once per window, or reset to None, which optimizers skip"),
            "held-nothing": Remedy(
                "step once, where a window has been accumulated; look for a library that steps as"
                " well",
                "update once per window, as `optax.MultiSteps` does: `optax.apply_every` hands the"
                " optimizer zeros in between",
            ),
        },
    ),
    _steps_fault(
        "wrong-step-count",
        "there are too many or too few steps, for no known reason",
        "compare with the windows: K micro-batches each, in `run.epochs` passes; look for a loop"
        " without an end",
        general=True,
        command="verify",
    ),
    _parameters_fault(
        "parameter-drift",
        "something other than `optimizer.step()` changes a parameter",
        "look for other code that writes to parameters: an average, a manual decay, a hook, a"
        " second optimizer. A loop that edits parameters on purpose assumes `edits-parameters`",
        jax=(
            "look for other code that changes parameters: an average, a manual decay, a second"
            " optimizer. A loop that edits parameters on purpose assumes `edits-parameters`"
        ),
    ),
    _parameters_fault(
        "parameter-not-updated",
        "the step leaves a parameter as it was, or the optimizer does not have the parameter",
        "keep every trainable parameter in `run.optimizer`",
        command="",
        causes={
            # `jax.jit` traces a pure function: what it writes to objects is lost when it returns
            "thrown-away": Remedy(
                "return the new parameters from the compiled step and keep them; a step that updates"
                " `nnx` objects in place needs `nnx.jit` in place of `jax.jit`"
            )
        },
    ),
    _parameters_fault(
        "optimizer-state-changed",
        "an entry of the optimizer's state has changed between two steps, or is missing",
        "look for code that writes to `run.optimizer.state` or clears it; restore it where you"
        " restore the model",
    ),
    _parameters_fault(
        "changed-settings",
        "a setting of the optimizer has changed between two steps, without a scheduler",
        "change settings by a scheduler, or assume `edits-settings` where the loop does so on"
        " purpose",
    ),
    _parameters_fault(
        "wrong-update",
        "the step changes a parameter differently than the optimizer does for the same gradients",
        "look for a hook or a patch inside the step, and for state that the loop puts in",
        jax=(
            "look for what changes the result of `run.optimizer.update`, and for state that the"
            " loop puts in"
        ),
    ),
    _parameters_fault(
        "changed-model",
        "the loop adds, removes, replaces, freezes, casts or moves a parameter",
        "train the model unchanged",
    ),
    _parameters_fault(
        "changed-torch",
        "the loop changes torch for the whole process: a function, a method, a kernel or a global"
        " hook",
        "patch the model or the optimizer that the run hands over, or undo the change before the"
        " loop returns",
    ),
    Fault(
        "raised",
        "raised",
        "the loop raises an exception",
        Remedy(
            "fix it, or switch off what the case does not support; `--optimizer` if it needs a"
            " certain one"
        ),
        "outcome",
        general=True,
        command="verify",
    ),
    Fault(
        "timed-out",
        "raised",
        "the loop does not return within `--time-limit` seconds",
        Remedy("look for an endless loop; raise the limit for a slow one"),
        "outcome",
        command="verify",
    ),
    Fault(
        "deadlock",
        "raised",
        "ranks wait for each other, or enter different collectives",
        Remedy("every rank must enter the same collectives, in the same order"),
        "outcome",
        command="verify",
    ),
    Fault(
        "not-accumulable",
        "not-accumulable",
        "the large batch's loss is not the sum of the micro-batches' losses",
        Remedy(
            "the explanation names the module or loss that is not separable over samples, or the"
            " right `count`"
        ),
        "problem",
        command="verify",
    ),
)
BY_LIBRARY = {
    (
        "accelerate",
        "short-window",
    ): (
        "Accelerate divides by K in a short window too, up to 1.15.0 at least:"
        " `GradientAccumulationPlugin(num_steps=K, sync_with_dataloader=False)` makes every window"
        " whole"
    ),
    (
        "lightning",
        "short-window",
    ): (
        "Lightning divides by `accumulate_grad_batches` in a short window too, up to 2.6.6 at least"
        " (Lightning#19987): let it divide the number of batches, or use manual optimization"
    ),
    (
        "transformers",
        "short-window",
    ): (
        "transformers 4.45.2 divides an epoch of fewer than K micro-batches by K: later "
        "releases divide by its length (transformers#39659)"
    ),
    (
        "transformers",
        "mean-of-means",
    ): (
        "transformers counts the targets of a window from 4.46 on (transformers#34191), "
        "for models and a `compute_loss_func` that divide by `num_items_in_batch`"
    ),
    (
        "transformers",
        "not-divided",
    ): (
        "transformers does not divide by K where a model takes `**kwargs`, up to 5.23.0 "
        "at least (transformers#47688): set `trainer.loss_is_scaled_for_ga = False`"
    ),
}
"""A trainer's package, and a fault or a cause that its own division may have, which no user fixes in the script ->
what helps there, as found in docs/found.md."""
FAULTS = {fault.name: fault for fault in _ROWS}
"""The faults by name, in the order of the documents."""


def names_of(diagnosis: str) -> frozenset[str]:
    """Return the faults that a diagnosis of the form `a or b` leaves open."""
    return frozenset(diagnosis.split(" or "))


def remedy_of(
    diagnosis: str, causes: Sequence[str] = (), *, jax: bool = False, library: str = ""
) -> str:
    """Return what to do about a diagnosis.

    Args:
        diagnosis: such as `wrong-scale`, or `a or b` where the evidence fits both.
        causes: what may have caused it; a fault of which no cause is among them has its general
            remedy.
        jax: whether the loop is one of JAX.
        library: the package of the trainer that runs the loop; empty without one.
    """
    found: dict[str, None] = {}
    for fault in (FAULTS[name] for name in diagnosis.split(" or ")):
        own = [fault.causes[cause] for cause in causes if cause in fault.causes] or [fault.remedy]
        # a dict keeps the order and each remedy once: several causes may share one
        found |= dict.fromkeys(one.jax if jax and one.jax else one.torch for one in own)
    of_library = [
        BY_LIBRARY[library, key] for key in (diagnosis, *causes) if (library, key) in BY_LIBRARY
    ]
    return ". ".join(["; or ".join(found), *of_library])


def remedy_over_ranks(explanation: str, diagnosis: str) -> str:
    """Return an explanation with what its remedy says where there are several ranks or devices."""
    for name in diagnosis.split(" or "):
        if name in FAULTS and (remedy := FAULTS[name].remedy).ranks:
            # the remedy is in the explanation as a text already: it was chosen before ranks were
            # known
            explanation = explanation.replace(remedy.torch, f"{remedy.torch}{remedy.ranks}", 1)
    return explanation


FIX = ". Fix: "
"""Stands in an explanation between what the loop did and what to do."""


def with_note(explanation: str, note: str) -> str:
    """Return an explanation with a note at the end of what the loop did, before what to do."""
    sentence, fix, remedy = explanation.partition(FIX)
    return f"{sentence} ({note}){fix}{remedy}"


def is_of_weights(diagnosis: str) -> bool:
    """Return whether a fault that a diagnosis leaves open is read off weights of micro-batches."""
    return any(
        name in FAULTS and FAULTS[name].evidence == "weights" for name in names_of(diagnosis)
    )


def is_general(kind: str, diagnosis: str) -> bool:
    """Return whether a violation's name says no more than that something is wrong, or where.

    Where the gradient is None, `no-gradient` is the whole diagnosis.
    """
    return kind != "none-pattern" and all(
        name in FAULTS and FAULTS[name].general for name in names_of(diagnosis)
    )
