"""The one table of faults: what each name means, what to do, by which evidence it is recognised, what it took in.

Console, JSON, `--accept`, report, audit and the documents' tables read it. A finer cause belongs into the sentence of a
violation and not into a new name, unless its remedy differs. To add one: a row here, and its predicate in `judge`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Evidence = Literal["weights", "elements", "sizes", "inputs", "steps", "state", "outcome", "problem"]
"""What a name is read off: weights of micro-batches, elements of parameters, sizes of gradients, inputs of losses, the
micro-batches of steps, parameters and the optimizer's state, how the loop ended, the objective."""


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: of it, in every command.
        kind: the part of the contract that it violates; a fault of gradients may also show as NaN or as None.
        meaning: what the loop does.
        remedy: what to do.
        evidence: that tells it.
        takes_in: names that records of 0.x have for it.
        general: whether the name says no more than that something is wrong, or where.
        command: `verify` or `audit` where one alone finds it; empty for both.
    """

    name: str
    kind: str
    meaning: str
    remedy: str
    evidence: Evidence
    takes_in: tuple[str, ...] = ()
    general: bool = False
    command: str = ""


def _gradient(name: str, evidence: Evidence, meaning: str, remedy: str, *old: str, **more: Any) -> Fault:
    return Fault(name, "gradient", meaning, remedy, evidence, old, **more)


def _steps(name: str, meaning: str, remedy: str, *old: str, **more: Any) -> Fault:
    return Fault(name, "step-count", meaning, remedy, "steps", old, **more)


_ROWS = (
    _gradient(
        "mean-of-means",
        "weights",
        "the means of micro-batches, of ranks or of groups of them have one weight, whatever they count",
        "multiply each mean by its count and divide by the window's count, added up over all ranks",
        "local-count",
    ),
    _gradient(
        "wrong-count",
        "weights",
        "means are weighted by something else than their counts: items, rounded counts, a power of the count, the "
        "count of a neighbour",
        "weight each mean by `run.count(batch)` over the window's count",
        "weighted-by-count",
    ),
    _gradient(
        "wrong-scale",
        "weights",
        "every item of the window, or of one rank, has the same wrong weight; the explanation states the factor and, "
        "where known, what it is: K, 1/K, r/K in a short window of r, a count over another one, a loss scale, the sign",
        "divide once, by the window's count; check that no library divides a second time",
    ),
    _gradient(
        "weighted-by-place",
        "weights",
        "an item's weight depends on the place of its micro-batch in the window",
        "weight each micro-batch by its count alone; look for a schedule, a loss scale or an index in the loss, or a "
        "special case for the first or last micro-batch",
        "unequal-factors",
    ),
    _gradient(
        "weighted-by-loss",
        "sizes",
        "an item's weight depends on the value of its micro-batch's loss",
        "look for a power, a logarithm, a focal weight or a scale that is computed from the loss",
        command="verify",
    ),
    _gradient(
        "rescaled-accumulator",
        "weights",
        "the weight of each micro-batch is a constant factor times that of the one before",
        "scale each contribution and not the accumulated gradient; reduce over ranks once per window",
        "reduced-repeatedly",
    ),
    _gradient(
        "repeated-micro-batch",
        "weights",
        "the gradient contains some micro-batches several times, perhaps in place of others",
        "call backward once per micro-batch, on its own loss and not on the running sum; look for closures that read a "
        "loop's variable late",
        "running-loss",
    ),
    _gradient(
        "dropped-micro-batch",
        "weights",
        "some micro-batches of the window are missing from the gradient",
        "look for a `continue`, a `break`, an iterator that is advanced twice, what is kept by size",
    ),
    _gradient(
        "reset-inside-window",
        "weights",
        "the gradient contains only the window's last micro-batch",
        "reset once per window, not once per micro-batch; add to the gradient instead of setting it",
    ),
    _gradient(
        "first-only",
        "weights",
        "the gradient contains only the window's first micro-batch",
        "look for what excludes later ones: a flag, a `no_sync`, a detached graph",
    ),
    _gradient(
        "no-gradient",
        "weights",
        "the gradient contains nothing of the window, or a parameter that its items reach has none (kind "
        "`none-pattern`)",
        "do not reset between backward and step; look for a parameter that is frozen, replaced or reset to None",
        "missing-gradient",
        general=True,
    ),
    _gradient(
        "not-reduced",
        "weights",
        "with `--ranks`: the gradient contains one rank's micro-batches and not all of the others', or nothing of a "
        "rank",
        "add up gradients of all ranks once, after the last backward of the window: look for a forward under "
        "`no_sync`, a rank that leaves out its all-reduce or does not wait for it, a broadcast or a reduce in place of "
        "an all-reduce",
        "partly-reduced",
        "dropped-rank",
    ),
    _gradient(
        "stale-window",
        "weights",
        "the gradient contains its own window and something of earlier ones",
        "reset once after every step, including that of the short last window; in a closure, reset at its start",
    ),
    _gradient(
        "other-window",
        "weights",
        "the gradient contains micro-batches of another window, in place of its own or of a later one beside it",
        "train the windows in the loader's order, each once; read gradients after they have been computed or "
        "communicated, and send a micro-batch backward after the step of the window before it",
        "later-window",
        "delayed-window",
    ),
    _gradient(
        "wrong-windows",
        "weights",
        "each micro-batch is in one step, but windows begin and end at other places than they should (as `gradient` or "
        "`step-count`)",
        "step after K micro-batches and after the last one of every epoch, where `(i + 1) % K == 0`, and begin anew in "
        "every epoch; look at the counter that decides when to step; a loop without a short window assumes "
        "`whole-windows`",
        "shifted-window",
        "windows-across-epochs",
        "wrong-window-size",
        "inverted-condition",
    ),
    _gradient(
        "unequal-items",
        "weights",
        "items of the same micro-batch have different weights",
        "look for a custom loss that weights its items",
        general=True,
    ),
    _gradient(
        "unrecognised-weights",
        "weights",
        "the gradient is a weighted sum of the window's micro-batches with weights of no known fault",
        "read the printed weights",
        general=True,
    ),
    _gradient(
        "low-precision",
        "elements",
        "weights or elements are the right ones with the rounding errors of a narrower dtype, or losses are computed "
        "under `torch.autocast` undeclared",
        "compute counts, quotients and sums in the parameter's dtype or a wider one; if autocast is meant, declare it: "
        '`--autocast DTYPE` or `@training_loop(autocast="bfloat16")`',
        "rounded-weights",
        "rounded-gradient",
        "undeclared-autocast",
    ),
    _gradient(
        "changed-batch",
        "inputs",
        "a loss is computed from a batch that the loader does not yield: other items, or other values",
        "look for what changes batches between the loader and the loss: a normalization in place, augmentation, "
        "truncation, padding, targets shifted against inputs",
        command="verify",
    ),
    _gradient(
        "wrong-mode",
        "inputs",
        "losses are computed in eval mode, and the gradient is right for that mode; in an audit, in several modes",
        "call `model.train()` after an evaluation",
        "mixed-modes",
    ),
    _gradient(
        "other-parameters",
        "inputs",
        "losses are computed at other parameters than those that the step changes, and the gradient is right there",
        "look for a copy or an average of the model, and for perturbed or rounded parameters",
        command="verify",
    ),
    _gradient(
        "stale-parameters",
        "inputs",
        "the gradient is right at the parameters of an earlier step, or parameters change while a window is "
        "accumulated",
        "look for a copy of the model that is not updated, a forward that runs before the previous step, a step or an "
        "edit of parameters inside the window",
        "moving-parameters",
    ),
    _gradient(
        "misplaced-gradient",
        "elements",
        "a parameter has the right elements at other places, or those of other parameters",
        "match parameters by name; look for an index, a gather or a reshape; go through the parameters in the same "
        "order on every rank",
        "permuted-gradient",
        "swapped-gradients",
        "mixed-gradients",
        command="verify",
    ),
    _gradient(
        "partial-gradient",
        "elements",
        "some elements of a parameter, or one use of it, are right and others wrong; the explanation says which, and "
        "what signs or sizes they have in common",
        "look for a slice, a mask, a shard, a clamp or a threshold, and for a copy in which tied parameters are two",
        "untied-weights",
        general=True,
        command="verify",
    ),
    _gradient(
        "not-summed",
        "elements",
        "each element of the gradient is another function of the micro-batches' or ranks' than their sum, such as the "
        "largest or the median; the explanation says which",
        "add up their gradients; over ranks with `ReduceOp.SUM`",
        "wrong-operation",
        command="verify",
    ),
    _gradient(
        "projected-gradient",
        "elements",
        "the mean of the gradient, of its rows or its columns, or what lies along the parameter, has been subtracted, "
        "or a mean stands in place of the elements",
        "do so inside the optimizer, if at all",
        command="verify",
    ),
    _gradient(
        "clipped",
        "sizes",
        "large gradients alone are wrong, and too small",
        "clip once, after the window's last backward; switch it off for the verification",
        command="verify",
    ),
    _gradient(
        "normalised",
        "sizes",
        "the gradient does not change with the size of the loss",
        "do not divide the gradient by its size, or reduce it to signs",
        command="verify",
    ),
    _gradient(
        "added-term",
        "sizes",
        "something that does not grow with the loss is added to the gradient, or that grows with its square: weight "
        "decay, a penalty, noise",
        "leave decay to the optimizer; switch noise off for the verification",
        command="verify",
    ),
    _gradient(
        "skipped-by-size",
        "sizes",
        "a micro-batch, a window or elements whose loss or gradient is large, or small, are left out (as `gradient` or "
        "`step-count`)",
        "switch off what skips them; give a `GradScaler` a smaller `init_scale`; look for a threshold, a sparse "
        "communication, a format with a narrow exponent",
        "flushed-to-zero",
        "skipped-steps",
        command="verify",
    ),
    _gradient(
        "overflow",
        "sizes",
        "a large gradient becomes infinite or NaN",
        "look for a square, a product or a coarser dtype",
        command="verify",
    ),
    _gradient(
        "skipped-non-finite",
        "sizes",
        "a micro-batch or window whose gradient is infinite or NaN is left out, or such elements are replaced",
        "use a `GradScaler`, or assume `finite-gradients`; remove `nan_to_num` or the clamp: it hides that the run "
        "diverged",
        "replaced-non-finite",
        command="verify",
    ),
    _gradient(
        "poisoned-by-earlier-window",
        "sizes",
        "the gradient contains a NaN or an infinity of an earlier window",
        "reset with `zero_()` or None, never by multiplying: 0 * NaN is NaN",
        command="verify",
    ),
    _gradient(
        "stolen-buffer",
        "elements",
        "a gradient shares memory with a buffer that backward writes again, or with another gradient",
        "return a new tensor from that backward, or keep `.grad` allocated and reset with `zero_`",
        command="verify",
    ),
    _gradient(
        "wrong-backward",
        "elements",
        "in an audit: a `torch.autograd.Function` of the model has another backward than the derivative of its forward",
        "mend its backward, or accept it where it is meant, as a straight-through estimator is",
        command="audit",
    ),
    _gradient(
        "not-repeatable",
        "outcome",
        "the loop gives another gradient when it runs again on the same case",
        "start anew in every run: no global counter, cache or iterator; draw from torch's generator alone",
        command="verify",
    ),
    _gradient(
        "plain-accumulation",
        "elements",
        'with `Problem(reduction="batch")`: the gradient is the sum or mean of the micro-batches\' own, and the '
        "objective "
        "is a function of the whole window",
        "compute it for the window's items together, or cache what they share (GradCache)",
        command="verify",
    ),
    _gradient(
        "not-linear",
        "elements",
        "the gradient is no weighted sum of micro-batches, and no other fault fits; the explanation says which "
        "parameters and elements are wrong, and whether they depend on the gradient's size or on the model",
        "switch off clipping and noise; check hooks, custom backwards, buffers and casts",
        general=True,
    ),
    _steps(
        "step-per-micro-batch",
        "the loop steps once per micro-batch, or its learning rate scheduler or `torch.amp.GradScaler` does",
        "step once per window; a schedule that is meant to count micro-batches assumes `schedules-micro-batches`",
        "scheduler-per-micro-batch",
        "scaler-per-micro-batch",
    ),
    _steps(
        "tail-dropped",
        "the short last window has no step, so its items never train the model",
        "step after the last micro-batch of an epoch too, or assume `whole-windows`",
    ),
    _steps(
        "tail-leak",
        "the short last window has no step, and its gradient is in the next epoch's first window",
        "step after the last micro-batch of an epoch too, and reset after it",
    ),
    _steps(
        "dropped-window",
        "some windows have no step; the explanation lists them",
        "look for a warm-up, or a range that ends early",
        command="verify",
    ),
    _steps(
        "never-stepped",
        "`run.optimizer` was never stepped",
        "step `run.optimizer`, not a copy or another optimizer",
        command="verify",
    ),
    _steps(
        "repeated-step",
        "a window's gradient is stepped several times, or a step comes right after a reset",
        "step once, where a window has been accumulated; look for a library that steps as well",
        "empty-step",
    ),
    _steps(
        "wrong-step-count",
        "too many or too few steps or passes, for no known reason; the explanation lists the micro-batches that each "
        "step held",
        "compare with the windows: K micro-batches each, `run.epochs` times; look for a loop without an end",
        "endless",
        "wrong-epochs",
        general=True,
        command="verify",
    ),
    *(
        Fault(name, "parameters", meaning, remedy, "state", tuple(old), command="verify")
        for name, meaning, remedy, *old in (
            (
                "parameter-drift",
                "something other than `optimizer.step()` changed a parameter before, between or after steps; nothing "
                "is allowed, not even a rounding",
                "look for other code that writes to parameters: an average, a manual decay, a hook, a second "
                "optimizer. A loop that edits parameters on purpose assumes `edits-parameters`",
            ),
            (
                "parameter-not-updated",
                "the step left a parameter as it was, where the optimizer changes it, or the parameter is in none of "
                "the optimizer's groups",
                "keep every trainable parameter in `run.optimizer`",
            ),
            (
                "optimizer-state-changed",
                "an entry of the optimizer's state is another at the next step, or is missing",
                "look for code that writes to `run.optimizer.state` or clears it; restore it where you restore the "
                "model",
                "optimizer-state-lost",
            ),
            (
                "changed-settings",
                "a setting of the optimizer (`maximize`, `weight_decay`, `betas`, `lr` without a scheduler) of a "
                "parameter is another than at the step before",
                "change settings by a scheduler, or assume `edits-settings` where the loop does so on purpose",
            ),
            (
                "wrong-update",
                "the step changed a parameter otherwise than the optimizer does on the same gradients, settings and "
                "state",
                "look for a hook or a patch inside the step, and for state that the loop puts in",
            ),
            (
                "changed-model",
                "the loop added, removed, replaced, froze, cast or moved a parameter",
                "train the model unchanged",
            ),
            (
                "changed-torch",
                "the loop, or its file when it was imported, changed torch for the whole process: it replaced a "
                "function, a method or a kernel, or left a hook on every module or optimizer",
                "patch the model or the optimizer that the run hands over, or undo the change before the loop returns",
            ),
        )
    ),
    Fault(
        "raised",
        "raised",
        "the loop raised an exception; the output contains its traceback",
        "fix it, or switch off what the case does not support",
        "outcome",
        general=True,
        command="verify",
    ),
    Fault(
        "timed-out",
        "raised",
        "the loop did not return within `--time-limit` seconds on one case",
        "look for an endless loop; raise the limit for a slow one",
        "outcome",
        command="verify",
    ),
    Fault(
        "deadlock",
        "raised",
        "with `--ranks`: ranks wait for each other, or met in different collectives; the explanation says where each "
        "is",
        "every rank must enter the same collectives, in the same order",
        "outcome",
        ("mismatched-collectives",),
        command="verify",
    ),
    Fault(
        "not-accumulable",
        "not-accumulable",
        "the large batch's loss is not the sum of the micro-batches'",
        "the explanation names the module or loss that is not separable over samples, or the right `count`",
        "problem",
        command="verify",
    ),
)
FAULTS = {fault.name: fault for fault in _ROWS}
"""The faults by name, in the order of the documents."""
_KINDS = {fault.kind for fault in _ROWS} | {"non-finite", "none-pattern"}
_TAKEN_IN = {old: fault.name for fault in _ROWS for old in fault.takes_in}


def names_of(diagnosis: str) -> frozenset[str]:
    """Return the faults that a diagnosis of the form `a or b` leaves open."""
    return frozenset(diagnosis.split(" or "))


def current_name(diagnosis: str) -> str:
    """Return a diagnosis of a record under today's names: of one that is gone, the name that took it in."""
    names = (_TAKEN_IN.get(name, name) for name in diagnosis.split(" or "))
    return " or ".join(dict.fromkeys(names))


def is_of_weights(diagnosis: str) -> bool:
    """Return whether a fault that a diagnosis leaves open is read off weights of micro-batches."""
    return any(name in FAULTS and FAULTS[name].evidence == "weights" for name in names_of(diagnosis))


def is_general(kind: str, diagnosis: str) -> bool:
    """Return whether a violation's name says no more than that something is wrong, or where.

    A gradient of None is no fault of elements or weights, so there `no-gradient` says all.
    """
    return kind != "none-pattern" and all(name in FAULTS and FAULTS[name].general for name in names_of(diagnosis))


def with_current_names(data: Any) -> Any:
    """Return the data of a record of any version with today's names: in `diagnosis`, and in texts `kind/diagnosis`."""
    if isinstance(data, list):
        return [with_current_names(value) for value in data]
    if not isinstance(data, dict):
        return _current_text(data)
    found: dict[Any, Any] = {}
    for key, value in data.items():
        name, new = _current_text(key), with_current_names(value)
        if key == "diagnosis" and isinstance(value, str):
            new = current_name(value)
        # numbers of runs under two names that are one
        found[name] = found[name] + new if name in found and isinstance(new, int) else new
    return found


def _current_text(text: Any) -> Any:
    kind, slash, name = text.partition("/") if isinstance(text, str) else ("", "", "")
    return f"{kind}/{current_name(name)}" if slash and kind in _KINDS else text


TABLES = {"Of gradients": ("gradient",), "Of steps": ("step-count",), "Of parameters, exceptions and Problems": ()}
"""Title of each table of the documents -> the kinds of its rows; the last one has all other kinds."""


def table_of(kinds: tuple[str, ...]) -> str:
    """Return the documents' table of the faults of some kinds, of all other kinds where none is given."""
    known = {kind for kinds in TABLES.values() for kind in kinds}
    head = ["diagnosis", *(["kind"] if not kinds else []), "what it means", "what to do"]
    rows = [head, ["---"] * len(head)]
    for fault in FAULTS.values():
        if fault.kind in kinds or (not kinds and fault.kind not in known):
            rows.append([f"`{fault.name}`", *([] if kinds else [f"`{fault.kind}`"]), fault.meaning, fault.remedy])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
