"""The one table of what an audit says beside violations: findings, and reasons why something was
not judged.

To add one: a row here, and a call of `finding` where it is seen. Console, JSON, `--accept`,
`--fail-on`, SARIF and the documents' tables read the rows. A finding that `verify` knows as a fault
has the name of the fault, and no row here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gradcheck_suite.core.faults import FAULTS

Kind = Literal["finding", "reason"]
Severity = Literal["warning", "note"]


@dataclass(frozen=True)
class FindingKind:
    """What a finding or a reason of one name is.

    Attributes:
        name: of the finding or the reason.
        kind: `finding` for what is worth knowing, `reason` for why something was not judged.
        meaning: what it says, in about ten words.
        remedy: what to do, in the imperative; empty where nothing is to be done.
        severity: `warning` where the training may be wrong or a part of it is unknown, `note` for
            what a program may well do on purpose.
    """

    name: str
    kind: Kind
    meaning: str
    remedy: str = ""
    severity: Severity = "warning"


def _finding(
    name: str, meaning: str, remedy: str = "", severity: Severity = "warning"
) -> FindingKind:
    return FindingKind(
        name,
        "finding",
        meaning,
        remedy,
        severity,
    )


def _note(name: str, meaning: str, remedy: str = "") -> FindingKind:
    return FindingKind(
        name,
        "finding",
        meaning,
        remedy,
        "note",
    )


def _reason(
    name: str, meaning: str, remedy: str = "", severity: Severity = "warning"
) -> FindingKind:
    return FindingKind(
        name,
        "reason",
        meaning,
        remedy,
        severity,
    )


_ROWS = (
    # parameters and optimizers
    _finding(
        "parameter-without-gradient",
        "parameters of an optimizer got no gradient in any step",
        "look for a `detach` or a `no_grad`, or leave them out of the optimizer",
    ),
    _finding(
        "parameter-without-optimizer",
        "parameters got gradients and are in no optimizer that steps",
        "add them to an optimizer, or set `requires_grad` to False",
    ),
    _finding(
        "parameter-listed-twice",
        "an optimizer lists a parameter more than once",
        "list it once",
    ),
    _finding(
        "overlaid-parameters",
        "different parameters lie over one memory",
        "assign the parameter itself, not its `.data`",
    ),
    _finding(
        "partly-reached-parameters",
        "parameters got a gradient in some passes of a window only",
    ),
    _finding(
        "parameter-as-constant",
        "a model computes with a trained parameter as a constant",
        "use the parameter itself where that should train it, too",
    ),
    _note(
        "parameter-without-later-gradient",
        "parameters had gradients in the first windows, and none since",
    ),
    _finding(
        "removed-gradient",
        "a gradient was taken away between backward and the step",
        "the program freezes them there; if it should not, look for what resets their `.grad`",
    ),
    _finding(
        "zero-gradient",
        "every gradient of a line is exactly 0",
        "look for a mask, a factor of 0, or a saturated function",
    ),
    # passes
    _finding(
        "discarded-pass",
        "what a line sent backward is in no step",
        "if it should be in one, do not reset between it and the step",
    ),
    _finding(
        "unused-call",
        "some calls of a module at a line led to no backward pass",
        "look for a loss that is detached, a `no_grad` that covers them, or a loss that is"
        " overwritten before its backward",
    ),
    _finding(
        "same-micro-batches",
        "all micro-batches of a window brought the same gradient",
        "if their items should differ, look for an iterator that is made anew for each, or a closure"
        " that reads the variable of a loop after its end",
    ),
    _note("occasional-pass", "a line calls backward in some windows only"),
    _finding(
        "gradient-before-loop",
        "a pass before the loop is in the first step",
        "reset the gradients before the loop",
    ),
    _note(
        "reset-before-first-step", "what other lines sent backward was reset before the first step"
    ),
    _note("reset-non-finite", "gradients were not finite, and were reset"),
    _finding(
        "reset-shared-pass",
        "a gradient was reset before a step, though another optimizer stepped on its pass",
        "if this loss should train them, reset their gradients after their own step alone; if not,"
        " `detach()` what they give to it",
    ),
    _note("discarded-window", "a whole window was reset without a step"),
    _note("window-begun-anew", "a window was reset and begun anew"),
    _note("window-given-up", "a window was given up before its end"),
    _note("two-points", "a window has passes at two points, as of SAM"),
    _note("composed-gradient", "the program puts kept gradients together itself"),
    _note("edited-gradient", "`.grad` is edited after the last pass"),
    _finding(
        "scaled-clipping",
        "gradients are clipped before the GradScaler unscales them",
        "call `scaler.unscale_(optimizer)` before",
    ),
    _note("hook-factor", "a hook multiplies what arrives at parameters"),
    _note("module-hook", "a backward hook on a module changes the gradient"),
    _finding(
        "packed-tensors",
        "hooks on saved tensors unpack other values than they have packed",
        "pack what is saved in as many bits as it has, where its exact gradient is meant",
    ),
    _finding(
        "mixed-modes",
        "a module changed its mode inside of a window",
        "call model.train() after every evaluation; whether the gradient depends on it is judged in"
        " windows that are computed again (`--every 1`)",
    ),
    # losses
    _note("coefficient", "a loss has a coefficient of the program's"),
    _note("changing-coefficient", "a coefficient of a loss changes within a window"),
    _note(
        "planned-count",
        "a loss is divided by the count of other windows",
        "for a mean over each window, divide by its own count",
    ),
    _note(
        "other-count",
        "a loss is divided by more than its valid targets",
        "for a mean over these, divide by their number",
    ),
    _finding(
        "miscounted",
        "a loss is divided by a number that counts nothing of it",
        "divide by the number of what the loss adds up, such as its valid targets",
    ),
    _finding(
        "undivided-term",
        "one term is a mean over the window, and another is not",
        "divide it, too, unless its coefficient is meant for each micro-batch",
    ),
    _finding(
        "repeated-outside-cache",
        "a gradient outside of cached items arrives from each pass",
        "divide it by the number of passes before the step",
    ),
    _finding(
        "own-gradient",
        "a custom function adds a gradient of its own",
        "give it one over the micro-batches of a window as its weight",
    ),
    _note("custom-function", "what is known of the backward of a custom function"),
    _finding("frameworks-differ", "torch and JAX differ in a gradient"),
    # declarations
    _finding(
        "unused-declaration",
        "a declaration of `--objective` matches no loss",
        "give the line that calls backward, and an expression of names that exist there",
    ),
    # ranks
    _finding(
        "same-data-on-ranks",
        "the same gradient arrived on all ranks",
        "give each rank its own (`DistributedSampler`), or train on one",
    ),
    _finding(
        "unequal-ranks",
        "parameters began with other values on each rank",
        "right for experts that each rank has for itself; else broadcast them before the first"
        " step",
    ),
    _finding(
        "ranks-train-apart",
        "ranks step on different gradients; each was judged by itself",
        "if they train one model, each with all of it, wrap it in DistributedDataParallel",
    ),
    _note("sharded-gradients", "gradients are sharded over the ranks"),
    # reasons: the losses and their sums
    _reason(
        "unreadable-loss",
        "the graph does not show how a loss weighs its items",
        "declare it with `loss = gradcheck_suite.objective(loss, count=n)`, n being what its mean"
        " divides by",
    ),
    _reason(
        "uneven-terms",
        "the number of terms of a loss differs between micro-batches",
        "declare it with `loss = gradcheck_suite.objective(loss, count=n)`, n being what its mean"
        " divides by",
    ),
    _reason(
        "joined-items",
        "a loss sees items without a gradient",
        severity="note",
    ),
    _reason("unread-weights", "the weights of a step's losses could not be read"),
    _reason(
        "written-gradient",
        "gradients were written by hand",
        "give each copy the gradient of one parameter, or step on the module's own parameters; in"
        " place of `torch.func.grad` call `torch.autograd.grad`",
    ),
    _reason(
        "unseen-pass",
        "a gradient came from no pass that Python started",
        "call `backward` from Python, and open the audit before the first pass",
    ),
    _reason(
        "flat-copies",
        "DeepSpeed's ZeRO steps on flat copies of its own",
        "audit the script with `zero_optimization.stage` 0: the losses weigh the same there",
    ),
    _reason(
        "too-few-elements",
        "too few elements tell which micro-batches are in `.grad`",
        "audit the script with fewer micro-batches in a window, or in float32",
    ),
    _reason(
        "unlike-gradient",
        "no sum of the passes explains most of `.grad`",
        "let the optimizer step on what backward has left in `.grad`, where it should",
    ),
    _reason(
        "unseen-writes",
        "writes to parameters through `.data` are not seen on a device",
        severity="note",
    ),
    _reason("functional-loss", "a loss inside of torch.func is not seen", severity="note"),
    _reason("step-inside-backward", "an optimizer steps inside of a backward pass"),
    _reason(
        "original-parameters",
        "FSDP with use_orig_params=True takes `.grad` away",
        "use `fully_shard`, or use_orig_params=False",
    ),
    # a run of JAX
    _note(
        "mapped-copies",
        "of the gradients of several copies, as of a `vmap`, the first ones were judged",
    ),
    _finding(
        "dependent-items",
        "items of a loss depend on other rows of their micro-batch",
        "no accumulation gives the gradient of the large batch",
    ),
    _note("custom-gradient", "a `custom_vjp` has a gradient that its forward has not"),
    _finding("no-update", "an optimizer gives updates of 0 in every call"),
    _note("changed-parameters", "changes of parameters are taken for steps"),
    _reason("unexplained-gradient", "the gradient at a step is no sum of those before it"),
    _reason("not-finite", "a gradient is not finite", severity="note"),
    _reason("no-gradient-before-step", "no gradient that was seen came before a step"),
    _reason("sharded-parameters", "each device has its own part of the parameters"),
    _reason("untraced-loss", "the gradient of a loss that cannot be traced was not seen"),
    _reason("unobserved-program", "a compiled program could not be looked into"),
    _reason("unsupported-version", "the installed JAX cannot be audited"),
    # reasons: steps
    _reason("frozen-parameters", "every parameter of the optimizer is frozen", severity="note"),
    _reason(
        "unstepped-parameters",
        "no parameter that backward reached is in an optimizer that steps",
        "look for a model that was copied, moved or replaced after the optimizer was made",
    ),
    _reason("no-pass", "a step without a backward since the previous one", severity="note"),
    _reason("gradients-taken-away", "all gradients were taken away before a step"),
    _reason(
        "counted-tail",
        "passes after the last step were only counted",
        "pass `--budget none`",
    ),
    # reasons: the window again
    _reason("not-recomputed", "a window could not be computed again", severity="note"),
    _reason("shared-passes", "another optimizer has stepped on the passes", severity="note"),
    _reason(
        "copied-parameters", "the optimizer steps on copies of the parameters", severity="note"
    ),
    _reason("several-ranks", "windows are not computed again on several ranks", severity="note"),
    _reason(
        "uncovered-parameters",
        "parameters had no part in the second computation",
        severity="note",
    ),
    _reason(
        "not-reproducible",
        "a call gives other results when it is made again",
        "let it draw from torch's, numpy's or Python's generators",
        severity="note",
    ),
    _reason(
        "unexplained-difference",
        "the window computed again differs, and nothing that was measured says why",
        "look at what the sentence does not rule out; `--without batch` judges the rest alone",
    ),
    # reasons: the whole run
    _reason("failed-instrument", "an instrument of the audit failed", "report it"),
    _reason(
        "concurrent-passes",
        "backward is called in several threads",
        "let one train at a time",
    ),
    _reason("switched-off", "every instrument was switched off"),
    _reason("no-step", "no optimizer step was seen"),
    _reason("nothing-trained", "neither a pass nor a step was seen"),
    _reason("nothing-judged", "no step could be judged"),
    _reason("other-rank", "rank 0 judges the steps of all ranks", severity="note"),
    _reason("lost-rank", "a rank has not ended, or ended with an exception"),
    _reason("unlike-ranks", "the ranks do different things"),
)
FINDINGS = {row.name: row for row in _ROWS}
"""Findings and reasons by name, in the order of the documents."""


@dataclass(frozen=True)
class Occurrence:
    """A finding or a reason, as a run showed it.

    Attributes:
        name: of its row, or of the fault as which `verify` knows it.
        sentence: what was seen, with its numbers.
        where: `file:line`, or None where it has no place.
        remedy: what to do; empty where nothing is to be done.
        kind: `finding`, or `reason` for why something was not judged.
        severity: `warning` where the training may be wrong or a part of it is unknown, `note` for
            what a program may well do on purpose.
        steps: how often it was seen.
        reason: why it is accepted; None where it is not.
        fails: whether it fails the command.
    """

    name: str
    sentence: str
    where: str | None = None
    remedy: str = ""
    kind: Kind = "finding"
    severity: Severity = "warning"
    steps: int = 1
    reason: str | None = field(default=None, metadata={"optional": ("audit",)})
    fails: bool = False

    @property
    def words(self) -> str:
        """What was seen and what to do, without the place."""
        return f"{self.sentence}: {self.remedy}" if self.remedy else self.sentence

    @property
    def place(self) -> str | None:
        """The user's own line of `where`, which may begin with that of a library."""
        return None if self.where is None else self.where.rpartition(" < ")[2]

    def __str__(self) -> str:
        said = f"{self.where}: {self.words}" if self.where else self.words
        return f"{said} ({self.steps} times)" if self.steps > 1 else said


def finding(
    name: str, sentence: str, where: object = None, remedy: str | None = None
) -> Occurrence:
    """Return a finding or a reason.

    Args:
        name: of its row, or of the fault as which `verify` knows it.
        sentence: what was seen, with its numbers.
        where: the place, or None.
        remedy: what to do, in place of that of the row; empty for nothing.
    """
    # a finding that is a fault in `verify` has the same name there, so that one entry accepts both
    row = FINDINGS.get(name) or _of_fault(name)
    place = None if where is None else str(where)
    remedy = row.remedy if remedy is None else remedy
    return Occurrence(
        name,
        sentence,
        place,
        remedy,
        row.kind,
        row.severity,
    )


def _of_fault(name: str) -> FindingKind:
    """Return the row of a finding that `verify` knows as a fault."""
    assert name in FAULTS, f"{name} has no row in core/findings.py"
    return FindingKind(
        name,
        "finding",
        FAULTS[name].meaning,
        FAULTS[name].remedy.torch,
    )
