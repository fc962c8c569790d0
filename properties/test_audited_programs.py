"""The audit on drawn programs: never a blame on a sound one, never silence on a faulty one.

A program is the text of a training script: windows of micro-batches with weights, resets, edits of
`.grad`, moves of parameters, optimizers and steps. It is sound as it is drawn, or has one fault,
which changes one of its pieces. So what is true of it is known before it runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from gradcheck_suite.auditing import evidence, judge, rules, weighing
from properties.helpers import scaled
from tests.auditing.running import audited

HEAD = """
import torch
from torch import nn
F = nn.functional
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
other = nn.Linear(5, 3)
params = list(net.parameters())
opt = torch.optim.SGD(net.parameters(), lr=0.1)
body, head = (torch.optim.SGD(net[i].parameters(), lr=0.1) for i in (0, 2))
beside = torch.optim.SGD(other.parameters(), lr=0.1)
average = [p.detach().clone() for p in params]
buffer = torch.zeros(80)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
def batch(n):
    return torch.randn(n, 5), torch.randint(0, 3, (n,)), torch.randn(n, 3)
def move(by, sign):
    with torch.no_grad():
        for p, d in zip(params, by):
            p.add_(d, alpha=sign)
"""
RESETS = (
    "{of}.zero_grad()",
    "{of}.zero_grad(set_to_none=False)",
    "for p in {of}.parameters(): p.grad = None",
    "for p in {of}.parameters():\n    if p.grad is not None: p.grad.zero_()",
    "torch._foreach_zero_([p.grad for p in {of}.parameters() if p.grad is not None] or [torch.zeros(1)])",
)
"""Ways of resetting a module's gradients."""
SUMS = {
    "entropy": ("F.cross_entropy(net(x), y{how})", ""),
    "squares": ("F.mse_loss(net(x), t{how})", "3 * "),
}
"""A loss, and by what the count of samples is multiplied in its mean."""
EDITS = (
    "torch.nn.utils.clip_grad_norm_(params, 0.05)",
    "for p in params: p.grad.add_(p.detach(), alpha=0.01)",
    "for p in params: p.grad.sign_()",
    "for p in params: p.grad.add_(0.01 * torch.randn_like(p))",
    "for p in net[2].parameters(): p.grad = None",
    "if step % 2:\n    net[0].zero_grad()",
    "for p in params: p.grad = 0.5 * p.grad",
)
"""What a program may do to `.grad` after the last pass, on purpose; the first one alone hides no fault of a sum."""
STATISTIC = (
    "F.cross_entropy(net(batch(6)[0]), torch.zeros(6, dtype=torch.long)).backward()\n"
    "opt.zero_grad()"
)
TURNS = (
    "beside.zero_grad()\n"
    "other(net(batch(4)[0]).detach() @ torch.ones(3, 5)).square().mean().backward()\n"
    "beside.step()"
)
AVERAGE = "for a, p in zip(average, params): a.lerp_(p.detach(), 0.1)"
OVERLAP = (
    "for p, at in zip(params, (0, 40, 47, 71)): p.grad = buffer[at : at + p.numel()].view_as(p)"
)
"""One element is the last one of a layer's bias and the first one of the next layer's weight."""
KEEP = "kept.append([p.grad.clone() for p in params])"
COMPOSE = "for p, *of in zip(params, *kept): p.grad = sum(of)"
CLIMB = "by = [0.05 * p.grad / (p.grad.norm() + 1e-9) for p in params]\nmove(by, 1)"


@dataclass
class Pieces:
    """A program in pieces, each a few statements.

    Attributes:
        windows: the sizes of the micro-batches of each window.
        loss: of a micro-batch.
        begin: of a window.
        inside: after each pass.
        end: after the last pass.
        after: after the step.
        reset: all gradients.
        reset_first: whether at the beginning of a window, or after the step.
        flat: whether one loop runs over the micro-batches of all windows.
        two_points: whether each window goes backward at moved parameters once more, and steps on
            that.
        backward: of a micro-batch.
        step: of the optimizers.
        between: the passes at the two points.
        second: the micro-batches at the second point.
        left_over: micro-batches of an epoch that no step follows.
    """

    windows: list[list[int]]
    loss: str
    reset: str
    reset_first: bool
    flat: bool
    two_points: bool = False
    begin: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    backward: str = "loss.backward()"
    step: str = "opt.step()"
    between: str = ""
    second: str = "seen"
    left_over: int = 0

    def text(self) -> str:
        """Return the script."""
        begin = [*([self.reset] if self.reset_first else []), *self.begin]
        after = [*self.after, *([] if self.reset_first else [self.reset])]
        one_pass = ["x, y, t = batch(n)", f"loss = {self.loss}", self.backward, *self.inside]
        end = [*self.end]
        if self.two_points:
            begin, one_pass = (
                ["seen = []", *begin],
                ["x, y, t = batch(n)", "seen.append((n, x, y, t))", *one_pass[1:]],
            )
            again = [
                f"for n, x, y, t in {self.second}:",
                *_indented([f"loss = {self.loss}", "loss.backward()"]),
            ]
            end = [CLIMB, self.between, *again, "move(by, -1)", *end]
        step = [*end, self.step, *after]
        if self.left_over:
            # a window ends by the number of micro-batches, and so does an epoch
            k = len(self.windows[0])
            body = [f"for i in range({len(self.windows) * k + self.left_over}):"]
            inner = [
                f"n, N, K, step = {self.windows[0][0]}, {sum(self.windows[0])}, {k}, i // {k}",
                *one_pass,
            ]
            inner += [f"if i % {k} == {k - 1}:", *_indented([*step, self.reset])]
            return HEAD + "\n".join(
                [
                    "for epoch in range(2):",
                    *_indented(["opt.zero_grad()", *body, *_indented(inner)]),
                ]
            )
        if self.flat:
            rows = [
                (s, j, n, sum(w), len(w))
                for s, w in enumerate(self.windows)
                for j, n in enumerate(w)
            ]
            inner = [
                "if j == 0:",
                *_indented(["pass", *begin]),
                *one_pass,
                "if j == K - 1:",
                *_indented(step),
            ]
            return HEAD + "\n".join([f"for step, j, n, N, K in {rows}:", *_indented(inner)]) + "\n"
        inner = [
            "N, K = sum(sizes), len(sizes)",
            *begin,
            "for j, n in enumerate(sizes):",
            *_indented(one_pass),
            *step,
        ]
        return (
            HEAD
            + "\n".join([f"for step, sizes in enumerate({self.windows}):", *_indented(inner)])
            + "\n"
        )


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for piece in lines for line in piece.splitlines()]


@dataclass(frozen=True)
class Program:
    """A script, the name of its fault, and what an audit may call that; nothing of a sound one."""

    text: str
    fault: str = ""
    diagnoses: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"{self.fault or 'sound'}:\n{self.text}"


@dataclass(frozen=True)
class Fault:
    """A fault of a program.

    Attributes:
        diagnoses: what it may be called.
        plant: puts it into the pieces of a sound program.
        of: what it needs: `equal` or `unequal` sizes, `mean` losses, `plain` ends of windows
            without a clipping.
        least: micro-batches of a window that it needs.
    """

    diagnoses: tuple[str, ...]
    plant: Callable[[Pieces, Callable[[st.SearchStrategy]], object], None]
    of: str = ""
    least: int = 1


FAULTS: dict[str, Fault] = {}


def fault(*diagnoses: str, of: str = "", least: int = 1) -> Callable[[Callable], Callable]:
    """Name what changes the pieces of a program."""

    def add(plant: Callable) -> Callable:
        FAULTS[plant.__name__] = Fault(diagnoses, plant, of, least)
        return plant

    return add


def _condition(draw: Callable, pieces: Pieces, *, last: bool = False) -> str:
    """Draw in which step something happens, and after which pass; all windows are long enough."""
    least = min(map(len, pieces.windows))
    j = least - 1 if last else draw(st.integers(0, least - 2))
    return draw(st.sampled_from([f"if j == {j}:", f"if j == {j} and step == 1:"]))


@fault("mean-of-means", of="unequal mean", least=2)
def means_of_unequal_micro_batches(pieces, draw):
    pieces.loss = pieces.loss.replace("* (n / N)", "/ K")


@fault("wrong-scale", of="equal mean plain", least=2)
def undivided(pieces, draw):
    pieces.loss = pieces.loss.replace(" * (n / N)", "")


@fault("wrong-scale", of="equal mean plain", least=3)
def divided_twice(pieces, draw):
    pieces.loss = pieces.loss.replace("* (n / N)", "/ K / K")


@fault("wrong-scale", of="equal mean plain", least=2)
def a_short_window_divided_by_k(pieces, draw):
    pieces.loss = pieces.loss.replace("* (n / N)", f"/ {len(pieces.windows[0])}")
    pieces.windows.append(pieces.windows[0][1:])


@fault("stale-window")
def never_reset(pieces, draw):
    pieces.reset = draw(
        st.sampled_from(["", "if step != 1:\n" + "\n".join(_indented([pieces.reset]))])
    )


@fault("stale-window")
def one_layer_never_reset(pieces, draw):
    pieces.reset = draw(st.sampled_from(RESETS)).format(of="net[2]")


@fault("no-gradient", of="plain")
def emptied(pieces, draw):
    reset = "\n".join(_indented([draw(st.sampled_from(RESETS)).format(of="net")]))
    pieces.end.append(draw(st.sampled_from(["if True:\n", "if step == 1:\n"])) + reset)


@fault("reset-inside-window", "dropped-micro-batch", least=2)
def reset_inside(pieces, draw):
    reset = draw(st.sampled_from(RESETS)).format(of=draw(st.sampled_from(["net", "net[0]"])))
    pieces.inside += [_condition(draw, pieces), *_indented([reset])]


@fault("repeated-micro-batch")
def twice_backward(pieces, draw):
    condition = _condition(draw, pieces, last=True)
    pieces.backward = "\n".join(
        [condition, "    loss.backward(retain_graph=True)", "loss.backward()"]
    )


@fault("tail-dropped", of="equal", least=2)
def a_rest_of_the_epoch(pieces, draw):
    pieces.left_over = draw(st.integers(1, len(pieces.windows[0]) - 1))


@fault("stale-parameters", least=2)
def moved_inside(pieces, draw):
    moved = draw(
        st.sampled_from(
            [
                "move([torch.randn_like(p) for p in params], 0.05)",
                "move([p / 9 for p in params], 1)",
            ]
        )
    )
    pieces.inside += [_condition(draw, pieces), *_indented([moved])]


@fault("not-linear", "rescaled-accumulator", of="plain", least=2)
def edited_inside(pieces, draw):
    pieces.inside.append(
        draw(
            st.sampled_from(
                [EDITS[0].replace("0.05", "0.001"), EDITS[1], EDITS[2], EDITS[3], EDITS[6]]
            )
        )
    )


@fault("wrong-scale", of="plain")
def scaled_and_not_unscaled(pieces, draw):
    pieces.backward = "scaler.scale(loss).backward()"


@fault("not-linear", of="plain")
def gradients_that_overlap(pieces, draw):
    pieces.begin.append(f"if step == 0:\n    {OVERLAP}")
    pieces.reset = RESETS[1].format(of="net")


@fault("no-gradient", of="plain")
def replaced(pieces, draw):
    new = "net[2].weight = opt.param_groups[0]['params'][2] = nn.Parameter(net[2].weight.detach().clone())"
    pieces.end.append(f"if step == 1:\n    {new}\n    params = list(net.parameters())")


@fault("dropped-micro-batch", of="two points", least=2)
def fewer_at_the_second_point(pieces, draw):
    pieces.second = draw(st.sampled_from(["seen[1:]", "seen[:-1]"]))


@fault("stale-parameters", of="two points")
def a_rest_of_the_first_point(pieces, draw):
    pieces.between = "pass"


@fault("mean-of-means", of="two points unequal mean", least=2)
def means_at_the_first_point(pieces, draw):
    # the second point reads the loss of `text`, which stays right
    first = pieces.loss.replace("* (n / N)", "/ K")
    pieces.backward = f"loss = {first}\n{pieces.backward}"


@fault("reset-inside-window", "dropped-micro-batch", of="plain", least=2)
def kept_and_never_used(pieces, draw):
    pieces.begin.append("kept = []")
    pieces.inside += [KEEP, "if j < K - 1:", *_indented([RESETS[0].format(of="net")])]


@fault("mean-of-means", of="plain unequal mean", least=3)
def kept_means(pieces, draw):
    means_of_unequal_micro_batches(pieces, draw)
    _compose(pieces)


def _compose(pieces: Pieces) -> None:
    """Let the program keep the gradient of each pass apart, and put `.grad` together from them."""
    pieces.begin.append("kept = []")
    pieces.inside += [KEEP, RESETS[0].format(of="net")]
    pieces.end.insert(0, COMPOSE)


@st.composite
def programs(draw, *, faulty: bool | None = None) -> Program:
    """Draw a program: a sound one, and in half of the cases a fault in it."""
    with_fault = draw(st.booleans()) if faulty is None else faulty
    name = draw(st.sampled_from([*FAULTS])) if with_fault else ""
    planted = FAULTS[name] if name else Fault((), lambda pieces, draw: None)
    of = planted.of
    k = draw(st.integers(planted.least, 4))
    unequal = "unequal" in of or ("equal" not in of and draw(st.booleans()))
    sizes = (
        st.lists(st.integers(1, 6), min_size=k, max_size=k, unique=True)
        if unequal
        else st.integers(1, 6)
    )
    drawn = [draw(sizes) for _ in range(draw(st.integers(3, 5)))]
    windows = drawn if unequal else [[drawn[0]] * k] * len(drawn)
    if k > 2 and not name and draw(st.booleans()):
        windows = [*windows, windows[0][1:]]  # a short window that is divided by its own count
    loss, per = SUMS[draw(st.sampled_from([*SUMS]))]
    shares = [
        f"{loss.format(how='')} * (n / N)",
        f"{loss.format(how=', reduction=' + repr('sum'))} / ({per}N)",
    ]
    coefficient = "" if name else draw(st.sampled_from(["", "0.3 * ", "1.7 * "]))
    pieces = Pieces(
        windows,
        coefficient + (shares[0] if "mean" in of else draw(st.sampled_from(shares))),
        draw(st.sampled_from(RESETS)).format(of="net"),
        draw(st.booleans()),
        draw(st.booleans()),
        two_points="two points" in of or (not name and k > 1 and draw(st.integers(0, 5)) == 0),
    )
    pieces.between = pieces.reset
    plain = name and ("plain" in of or pieces.two_points)
    if not plain and draw(st.booleans()):
        pieces.end.append(draw(st.sampled_from(EDITS[:1] if name else EDITS)))
    if draw(st.integers(0, 3)) == 0:
        pieces.begin += draw(
            st.sampled_from(
                [[TURNS], [STATISTIC]] if pieces.reset_first and not name else [[TURNS]]
            )
        )
    if draw(st.integers(0, 3)) == 0:
        pieces.after.append(AVERAGE)
    if not plain and draw(st.integers(0, 3)) == 0:
        pieces.step = "body.step()\nhead.step()"
    if not name and not pieces.two_points:
        special = draw(st.integers(0, 7))
        if special == 0:
            _compose(pieces)
        elif special == 1:
            pieces.backward = "scaler.scale(loss).backward()"
            pieces.end.insert(0, "scaler.unscale_(opt)")
            pieces.after.append("scaler.update()")
    planted.plant(pieces, draw)
    return Program(pieces.text(), name, planted.diagnoses)


def said(program: Program) -> str:
    """Run a program under an audit, and return what is wrong with the verdict.

    Nothing where it is right.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "drawn.py"
        script.write_text(program.text)
        result, _ = audited(script, quiet=True)
    named = [violation.diagnosis for violation in result.violations]
    if not program.fault:
        return "" if result.verdict == "holds" else str(result)
    return "" if named and set(named) <= set(program.diagnoses) else str(result)


@settings(scaled(3))
@given(programs())
def test_a_sound_program_is_not_blamed_and_the_fault_of_a_faulty_one_is_named(program):
    assert not said(program)


def _blind(*_):
    return rules.Decided()


@pytest.mark.parametrize(
    ("owner", "name", "broken", "faulty"),
    [
        (judge, "decide", _blind, True),
        pytest.param(weighing, "scales", lambda *_: [], True, marks=pytest.mark.full),
        pytest.param(
            evidence.WindowEvidence, "moved", lambda *_: True, False, marks=pytest.mark.full
        ),
    ],
)
def test_a_fault_of_the_audit_is_found_by_the_property(monkeypatch, owner, name, broken, faulty):
    monkeypatch.setattr(owner, name, broken)
    few = settings(max_examples=40, phases=[Phase.generate], database=None, derandomize=True)
    found = find(programs(faulty=faulty), lambda program: bool(said(program)), settings=few)
    assert bool(found.fault) == faulty
