"""The window again: how it is computed, what it finds, what it leaves alone, and how small an error
it sees.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everyone calls it
from torch.utils.checkpoint import checkpoint

import gradcheck_suite
from gradcheck_suite.__main__ import main
from gradcheck_suite.auditing import custom_functions
from gradcheck_suite.auditing.custom_functions import GIVEN, LEAST, judge_backward
from gradcheck_suite.auditing.function_calls import first_calls
from gradcheck_suite.auditing.recomputation import NOT_CALLED
from tests.auditing.running import audited

HOW = {
    "sound_counted": {"in one batch": 1},
    "sound_model_returns_its_loss": {"micro-batch by micro-batch": 1},
    "sound_normalized_batches": {"micro-batch by micro-batch": 1},
    "sound_features": {"in one batch": 1},
    "sound_dropout": {"micro-batch by micro-batch": 1},
    "sound_evaluation_mode_of_a_part": {"micro-batch by micro-batch": 1},
    "sound_inputs_in_one_buffer": {"in one batch": 1},
    "sound_shared_module": {"in one batch": 1},
    "sound_sparse_alone": {"micro-batch by micro-batch": 1},
    "sound_averaged_weights_swapped_back": {"in one batch": 1},
    "sound_compiled_model": {"in one batch": 1},
    "sound_sharpness_aware": {"micro-batch by micro-batch": 1},
    "sound_tied_and_frozen": {"micro-batch by micro-batch, 2 of 3 parameters": 1},
}
"""Script -> how its windows are computed again, and how many."""
REASONS = {
    "sound_inputs_in_one_buffer": "changed in place",
    "sound_sharpness_aware": "parameters were written",
}
"""Script -> a part of the reason why a window was not computed again."""


@pytest.mark.parametrize("name", HOW)
def test_it_is_said_how_a_window_was_computed_again_or_why_not(name, scripts):
    result, _ = audited(scripts / f"{name}.py", every=10)
    assert (result.verdict, result.again) == ("holds", HOW[name]), result
    said = [finding for finding in result.findings if "not computed again" in finding]
    assert len(said) == (name in REASONS)
    assert all(REASONS[name] in finding for finding in said), said


def test_the_first_window_and_every_third_after_it(tmp_path, scripts):
    path, script = tmp_path / "r.json", str(scripts / "sound_halved.py")
    for options, expected in (
        (["--every", "3"], {"in one batch": 2}),
        (["--every", "1"], {"in one batch": 3, "one micro-batch of each in turn": 1}),
        (["--without", "batch"], {}),
        (["--every", "10", "--without", "weights", "--without", "sums"], {"in one batch": 1}),
        ([], {"in one batch": 3}),
    ):
        assert main(["audit", *options, "--json", str(path), script]) == 0, options
        assert json.loads(path.read_text())["results"][0]["again"] == expected, options


def test_every_window_is_computed_again_where_a_parameter_is_unfrozen_inside_of_one(scripts):
    result, _ = audited(scripts / "sound_unfrozen_inside_a_window.py", every=1)
    assert result.again == {"in one batch": 2, "micro-batch by micro-batch": 1}
    (finding,) = result.findings
    assert (
        "2 parameters of the optimizer got a gradient in some passes of a window and in others none"
        in finding
    )


EVALUATED_IN_TWO_WINDOWS = """
import toy, torch

model = torch.nn.Sequential(torch.nn.Dropout(0.5), *toy.classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, window in enumerate(toy.windows(*[4] * 14, steps=2)):
    model.train()
    for x, y in window:
        (torch.nn.functional.cross_entropy(model(x), y) / len(window)).backward()
        if number in (3, 5):
            model.eval()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("every", "found"), [(1, 3), (3, 3), (5, 5), (4, None), (10, None)])
def test_a_fault_that_this_instrument_alone_finds_is_found_at_the_first_faulty_window_that_is_due(
    every, found, tmp_path, monkeypatch, scripts
):
    monkeypatch.syspath_prepend(str(scripts))
    script = tmp_path / "evaluated.py"
    script.write_text(EVALUATED_IN_TWO_WINDOWS)
    result, _ = audited(script, every=every)
    assert sum(result.again.values()) == len(range(0, 7, every))
    assert [(v.diagnosis, v.step) for v in result.violations] == [("wrong-mode", found)] * (
        found is not None
    )
    said = [
        finding
        for finding in result.findings
        if "a module ran in train mode in some micro-batches" in finding
    ]
    # of the windows 3 and 5, those that are not computed again
    assert len(said) == (every != 1), result
    assert all(("(2 times)" in finding) == (found is None) for finding in said)


def test_windows_of_each_of_several_optimizers_are_computed_again():
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.5)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with gradcheck_suite.audit() as audit:
        for _ in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                for micro_batch in range(2):
                    models[1].train(micro_batch == 0)
                    (model(torch.randn(4, 5)).square().mean() / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert [(v.diagnosis, v.step) for v in audit.result.violations] == [("wrong-mode", 1)], (
        audit.result
    )


def _window(sizes, dtype, weight):
    """Train one window and return the model, its gradient, and the gradient of one batch of all
    items.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(
        dtype
    )
    batches = [(torch.randn(n, 5, dtype=dtype), torch.randint(0, 3, (n,))) for n in sizes]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    right = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    with gradcheck_suite.audit() as audit:
        for x, y in batches:
            (F.cross_entropy(model(x), y) * weight(len(y))).backward()
        optimizer.step()
    return audit.result, [p.grad for p in model.parameters()], right


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_error_of_the_gradient_is_that_from_one_batch(dtype):
    result, observed, right = _window((4, 2, 7, 1), dtype, lambda n: 1 / 4)
    differences = torch.cat([(a - b).flatten() for a, b in zip(observed, right, strict=True)])
    expected = float(differences.norm() / torch.cat([b.flatten() for b in right]).norm())
    assert result.violation.diagnosis == "mean-of-means"
    assert result.violation.gradient_error == pytest.approx(expected, rel=1e-4)
    assert _window((4, 2, 7, 1), dtype, lambda n: n / 14)[0].holds


@pytest.mark.parametrize("sparse", [False, True])
def test_the_error_of_a_window_that_is_reset_halfway_is_that_of_what_is_lost(sparse):
    torch.manual_seed(0)
    table, arrived = torch.nn.Embedding(9, 4, sparse=sparse), []
    optimizer = torch.optim.SGD(table.parameters(), lr=0.0)
    with gradcheck_suite.audit() as audit:
        for _ in range(3):
            optimizer.zero_grad()
            (table(torch.randint(0, 9, (6,))).square().mean() / 3).backward()
            arrived.append(table.weight.grad.to_dense())
        optimizer.step()
    expected = float(sum(arrived[:-1]).norm() / sum(arrived).norm())
    (violation,) = audit.result.violations
    assert violation.diagnosis == "reset-inside-window"
    assert violation.gradient_error == pytest.approx(expected, rel=1e-4)


SMALLEST = {torch.float32: 1e-4, torch.float64: 1e-13}
"""A relative change of one layer's gradient that is found; a hundredth of it is rounding."""


@pytest.mark.parametrize("dtype", SMALLEST)
def test_a_small_change_by_a_backward_hook_is_found_and_rounding_is_not(dtype):
    for factor, found in ((30 * SMALLEST[dtype], True), (SMALLEST[dtype] / 1000, False)):
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        ).to(dtype)
        model[1].register_full_backward_hook(lambda m, i, o, factor=factor: (i[0] * (1 + factor),))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with gradcheck_suite.audit() as audit:
            for _ in range(3):
                F.cross_entropy(
                    model(torch.randn(4, 5, dtype=dtype)), torch.tensor([0, 1, 2, 1])
                ).div(3).backward()
            optimizer.step()
        said = [
            finding
            for finding in audit.result.findings
            if "a backward hook on a module (1)" in finding
        ]
        assert (audit.result.verdict, bool(said)) == ("holds", found), (factor, audit.result)


@pytest.mark.parametrize(
    ("preserves", "found"), [(False, ["wrong-backward"]), (True, []), (None, [])]
)
def test_a_checkpoint_that_draws_other_numbers_is_named_and_a_function_that_draws_is_not(
    preserves, found
):
    block = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Dropout(0.5))
    model, optimizer = torch.nn.ModuleList([block]), torch.optim.SGD(block.parameters(), lr=0.1)
    ways = {
        None: lambda x: elementwise(lambda y: 2 * y, lambda y: 2 + 0 * block[1](y)).apply(block(x))
    }
    model.forward = ways.get(
        preserves, partial(checkpoint, block, use_reentrant=False, preserve_rng_state=preserves)
    )
    with gradcheck_suite.audit() as audit:
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
    assert ([v.diagnosis for v in audit.result.violations], len(audit.result.again)) == (
        found,
        1,
    ), audit.result


def test_hooks_of_the_user_do_not_run_again_and_nothing_is_printed(capsys):
    calls = []

    class Loud(torch.nn.Linear):
        def forward(self, x):
            print("forward")
            return super().forward(x)

    model = torch.nn.Sequential(Loud(5, 3), torch.nn.BatchNorm1d(3))
    model[0].weight.register_hook(lambda gradient: calls.append("parameter"))
    model[1].register_full_backward_hook(lambda module, inputs, outputs: calls.append("module"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gradcheck_suite.audit() as audit:
        for _ in range(2):
            F.cross_entropy(model(torch.randn(4, 5)), torch.tensor([0, 1, 2, 1])).div(2).backward()
        gradients, statistics = (
            [p.grad.clone() for p in model.parameters()],
            model[1].running_mean.clone(),
        )
        random = torch.get_rng_state()
        optimizer.step()
    assert audit.result.again == {"micro-batch by micro-batch": 1}
    assert sorted(calls) == ["module"] * 2 + ["parameter"] * 2
    assert capsys.readouterr().out == "forward\n" * 2
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    assert torch.equal(statistics, model[1].running_mean)
    assert torch.equal(random, torch.get_rng_state())
    assert model[1].num_batches_tracked == 2


# Custom functions whose backward is wrong are named, and those that are right or differ on purpose
# are not.


def custom(forward, backward, **more):
    """Return a custom function.

    Its `forward` saves its arguments unless it takes a context itself.
    """

    def saving(context, *arguments):
        context.save_for_backward(*arguments)
        return forward(*arguments)

    functions = {"forward": forward if more.get("own_context") else saving, "backward": backward}
    return type(
        "Custom", (torch.autograd.Function,), {k: staticmethod(f) for k, f in functions.items()}
    )


def judged(kind, *arguments):
    """Return the verdict on a class from one call of it."""
    apply = kind.apply  # as programs keep it
    with first_calls({kind}) as calls:
        apply(*arguments)
    return judge_backward(*calls[kind].values())


def leaf(*shape, dtype=torch.float32):
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    )


def product(factor):
    def backward(context, gradient):
        x, weight = context.saved_tensors
        return gradient @ weight, factor * gradient.T @ x

    return custom(lambda x, weight: x @ weight.T, backward)


def elementwise(forward, derivative):
    return custom(forward, lambda context, gradient: gradient * derivative(*context.saved_tensors))


def only_float32(x):
    if x.dtype != torch.float32:
        raise TypeError("float32 only")
    return x.tanh()


def only_bfloat16(x):
    if x.dtype != torch.bfloat16:
        raise TypeError("bfloat16 only")
    return x * 2


def through_float32(x):
    return x.float().tanh().to(x.dtype)


def attention_back(context, gradient):
    q, k = context.saved_tensors
    weights = (q.float() @ k.float().T).softmax(-1)
    scores = weights * (gradient.float() - (gradient.float() * weights).sum(-1, keepdim=True))
    return (scores @ k.float()).to(q.dtype), (scores.T @ q.float()).to(k.dtype)


def slope(x):
    return 1 - x.tanh() ** 2


def dynamic(levels):
    def rounded(x):
        scale = x.abs().max() / levels
        return (x / scale).round() * scale

    return rounded


def ones(x):
    return torch.ones_like(x)


ATTENTION = custom(lambda q, k: (q.float() @ k.float().T).softmax(-1).to(q.dtype), attention_back)
SMALL = (leaf(64, 4).detach() / 10).requires_grad_()
GENERATOR = torch.Generator()
ZEROS = torch.relu(leaf(8, 5).detach()).requires_grad_()
POSITIVE = leaf(50).detach().abs().requires_grad_()
SOUND = {
    "a product": (product(1), leaf(8, 5), leaf(4, 5)),
    "exp": (elementwise(torch.exp, torch.exp), leaf(8, 5)),
    "log of positive numbers": (elementwise(torch.log, lambda x: 1 / x), POSITIVE),
    "relu at zeros": (elementwise(torch.relu, lambda x: (x > 0).to(x)), ZEROS),
    "the other derivative at zeros": (elementwise(torch.relu, lambda x: (x >= 0).to(x)), ZEROS),
    "a square root at zeros": (elementwise(torch.sqrt, lambda x: 0.5 / x.sqrt()), ZEROS),
    "float32 inside": (elementwise(through_float32, slope), leaf(8, 5)),
    "a softmax in float32 that small steps do not move": (ATTENTION, SMALL, SMALL),
    "float32 alone": (elementwise(only_float32, slope), leaf(8, 5)),
    "a saturated sigmoid": (
        elementwise(torch.sigmoid, lambda x: x.sigmoid() * (1 - x.sigmoid())),
        leaf(8, 5) * 100,
    ),
    "a gradient cut above 15": (
        elementwise(torch.exp, lambda x: x.clamp(max=15).exp()),
        leaf(8, 5),
    ),
    "an error below what is looked for": (product(1 + LEAST / 10), leaf(8, 5), leaf(4, 5)),
}
ON_PURPOSE = {
    "reversal": (custom(lambda x: x.view_as(x), lambda context, gradient: -gradient), leaf(8, 5)),
    "sign": (elementwise(torch.sign, ones), leaf(8, 5)),
    "round": (elementwise(lambda x: x.mul(8).round() / 8, ones), leaf(8, 5)),
    "clamp": (elementwise(lambda x: x.clamp(-1, 1), ones), leaf(8, 5)),
    "8 bits": (elementwise(dynamic(127), ones), leaf(16, 16)),
    "4 bits": (elementwise(dynamic(7), ones), leaf(16, 16)),
    "one bit": (elementwise(lambda x: x.sign() * x.abs().mean(), ones), leaf(16, 16)),
    "random numbers of its own": (
        elementwise(lambda x: x * torch.rand((), generator=GENERATOR), ones),
        leaf(5),
    ),
    "bfloat16 alone": (elementwise(only_bfloat16, ones), leaf(8, 5, dtype=torch.bfloat16)),
}
FAULTY = {
    "half": ((elementwise(lambda x: x**2, lambda x: x), leaf(8, 5)), "0.5 times the derivative"),
    "a sign": (
        (product(-1), leaf(8, 5), leaf(4, 5)),
        "with respect to argument 1 it is -1 times the derivative",
    ),
    "one percent": ((product(1.01), leaf(8, 5), leaf(4, 5)), "argument 1 it is 1.01 times"),
    "five percent of a curve": (
        (elementwise(torch.exp, lambda x: 1.05 * x.exp()), leaf(8, 5)),
        "1.05 times",
    ),
    "a term left out": (
        (elementwise(lambda x: x.softmax(1), lambda x: x.softmax(1)), leaf(8, 5)),
        "it is not the derivative",
    ),
    "relu at zeros": ((elementwise(torch.relu, lambda x: 2 * (x > 0).to(x)), ZEROS), "2 times"),
    "log": ((elementwise(torch.log, lambda x: 2 / x), POSITIVE), "2 times"),
    "float32 inside": (
        (elementwise(through_float32, lambda x: 1.5 * slope(x)), leaf(8, 5)),
        "1.5 times",
    ),
    "float32 alone": (
        (elementwise(only_float32, lambda x: 1.5 * slope(x)), leaf(8, 5)),
        "1.5 times",
    ),
}


def test_a_sound_function_is_not_blamed_and_there_is_nothing_to_say():
    for name, (kind, *arguments) in SOUND.items():
        verdict = judged(kind, *arguments)
        assert (verdict.fault, verdict.note) == ("", ""), (name, verdict)


def test_a_function_that_differs_on_purpose_is_noted():
    for name, (kind, *arguments) in ON_PURPOSE.items():
        verdict = judged(kind, *arguments)
        assert verdict.note, name
        assert not verdict.fault, (name, verdict)


def test_a_wrong_backward_is_named():
    for name, ((kind, *arguments), fault) in FAULTY.items():
        verdict = judged(kind, *arguments)
        assert fault in verdict.fault, (name, verdict)
        assert verdict.error > LEAST


def test_random_numbers_are_those_of_the_call():
    def forward(context, x):
        context.kept = (torch.rand_like(x) > 0.5) * 2
        return x * context.kept

    for factor, fault in (
        (1, ""),
        (0.5, "with respect to argument 0 it is 0.5 times the derivative of its forward"),
    ):
        kind = custom(
            forward, lambda context, g, factor=factor: factor * g * context.kept, own_context=True
        )
        assert judged(kind, leaf(8, 5)).fault == fault


def test_a_function_that_writes_to_its_argument():
    def forward(context, x):
        context.mark_dirty(x)
        return x.mul_(3)

    for factor, fault in (
        (3, ""),
        (1, "with respect to argument 0 it is 0.333 times the derivative of its forward"),
    ):
        kind = custom(
            forward, lambda context, gradient, factor=factor: factor * gradient, own_context=True
        )
        assert judged(kind, leaf(8, 5) * 1).fault == fault


def test_an_output_that_is_marked_as_not_differentiable_is_left_out():
    """As the statistics that the fused loss of trl's trainers returns for its log."""

    def forward(context, x):
        context.save_for_backward(x)
        logged = x.detach().square().mean()
        context.mark_non_differentiable(logged)
        return x.tanh(), logged

    for factor, fault in (
        (1, ""),
        (2, "with respect to argument 0 it is 2 times the derivative of its forward"),
    ):

        def backward(context, gradient, _, factor=factor):
            return factor * gradient * slope(*context.saved_tensors)

        assert judged(custom(forward, backward, own_context=True), leaf(8, 5)).fault == fault


def test_an_output_that_float32_holds_still_at_small_steps_is_not_constant():
    """As the entropy that the fused loss of trl's trainers returns in float32, whatever its
    arguments are in.
    """

    def forward(context, x):
        context.save_for_backward(x)
        y = x.float().tanh()
        return y, 12 + 0.03 * y

    for factor in (1, 2):

        def backward(context, first, second, factor=factor):
            return factor * (first + 0.03 * second) * slope(*context.saved_tensors)

        verdict = judged(custom(forward, backward, own_context=True), leaf(20, 5))
        assert (bool(verdict.fault), verdict.note) == (factor == 2, ""), verdict


def test_the_new_style_of_functions():
    class New(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.tanh()

        @staticmethod
        def setup_context(context, inputs, output):
            context.save_for_backward(output)

        @staticmethod
        def backward(context, gradient):
            return gradient * (1 - context.saved_tensors[0])

    assert "it is not the derivative" in judged(New, leaf(8, 5)).fault


class Silent(torch.autograd.Function):
    """Whose subclasses nobody is told of."""

    def __init_subclass__(cls):
        pass


def exponential(factor, base=torch.autograd.Function, slope=None):
    """Return a new class, which multiplies by a slope that it is given or by its own."""

    class Exponential(base):
        @staticmethod
        def forward(context, hidden):
            assert Exponential.__name__ == "Exponential"
            context.save_for_backward(hidden.exp())
            return hidden.exp()

        @staticmethod
        def backward(context, gradient):
            return factor * gradient * (context.saved_tensors[0] if slope is None else slope)

    return Exponential


class Layer(torch.nn.Module):
    """A layer that makes the class of its custom function in each forward."""

    def __init__(self, made):
        super().__init__()
        self.weight, self.made = torch.nn.Parameter(leaf(5, 3).detach()), made

    def forward(self, x):
        hidden = x @ self.weight
        return self.made(hidden.detach()).apply(hidden)


@pytest.mark.parametrize("sizes", [(4, 4), (4, 2), (4,)])
@pytest.mark.parametrize(
    ("made", "violated", "said"),
    [
        (lambda hidden: exponential(1), False, None),
        (lambda hidden: exponential(2), True, None),
        (lambda hidden: exponential(2, Silent), False, NOT_CALLED),
        (lambda hidden: exponential(1, slope=hidden.exp()), False, GIVEN),
        (lambda hidden: exponential(hidden.norm().item()), False, GIVEN),
    ],
)
def test_a_class_that_is_made_anew_in_each_forward_is_judged_once_or_said_not_to_be(
    made, violated, said, sizes
):
    model = Layer(made)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gradcheck_suite.audit(every=1) as audit:
        for _ in range(2):
            for n in sizes:
                (model(leaf(n, 5).detach()).square().sum() / sum(sizes)).backward()
            optimizer.step()
            optimizer.zero_grad()
    result = audit.result
    assert sum(result.again.values()) == 2, result
    assert [(v.diagnosis, v.occurrences) for v in result.violations] == [
        ("wrong-backward", 1)
    ] * violated
    found = [finding for finding in result.findings if "custom function" in finding]
    assert [said in finding and not finding.endswith("times)") for finding in found] == [True] * (
        said is not None
    )


def test_a_large_call_is_not_judged_and_this_is_said(monkeypatch):
    monkeypatch.setattr(custom_functions, "LARGEST", 39)
    assert (
        "its arguments have 40 elements"
        in judged(elementwise(lambda x: x * 2, ones), leaf(8, 5)).note
    )


class _Again(torch.autograd.Function):
    """A checkpoint of one's own that calls functions and no module, without the random state."""

    @staticmethod
    def forward(ctx, run, x, *parameters):
        ctx.run = run
        ctx.parameters = parameters
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        return None, *torch.autograd.grad(y, (x, *ctx.parameters), gradient)


class _OfFunctions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.weight = torch.nn.Parameter(torch.randn(1, 4))

    def forward(self, x):
        def run(hidden):
            return F.linear(F.dropout(hidden), self.weight)

        return _Again.apply(run, self.first(x), self.weight)


def test_a_checkpoint_that_calls_functions_alone_and_draws_anew_is_found():
    torch.manual_seed(0)
    model = _OfFunctions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_suite.audit(quiet=True) as audit:
        for _ in range(4):
            model(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (violation,) = audit.result.violations
    assert violation.diagnosis == "wrong-backward", audit.result
    assert "the backward of custom function _Again is wrong" in violation.sentence


MOVED_BACK = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
if {hooked}:
    net[1].register_full_backward_hook(lambda module, inner, outer: (2 * inner[0],))
for step in range(5):
    x, y = torch.randn(8, 5), torch.randint(0, 3, (8,))
    nn.functional.cross_entropy(net(x), y).backward()
    by = [0.05 * p.grad / p.grad.norm() for p in net.parameters()]
    for p, d in zip(net.parameters(), by):
        p.data.add_(d)
    opt.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    for p, d in zip(net.parameters(), by):
        p.data.sub_(d)
    opt.step()
    opt.zero_grad()
"""


@pytest.mark.parametrize("hooked", [False, True])
def test_parameters_that_are_put_back_before_the_step_are_kept_for_the_next_window(
    hooked, tmp_path
):
    """Each window is then computed again from the parameters of its calls."""
    path = tmp_path / "moved_back.py"
    path.write_text(MOVED_BACK.format(hooked=hooked))
    result, _ = audited(path)
    assert sum(result.again.values()) == 3, result
    reasons = [one for one in result.named_findings if one.name == "not-recomputed"]
    assert [one.steps for one in reasons] == [1], result
    # a hook that multiplies is the program's decision, and is seen by the second computation alone
    names = {one.name for one in result.named_findings}
    assert ("module-hook" in names) is hooked, result


PACKED = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def pack(tensor):
    step = tensor.abs().amax().clamp(min=1e-9) / 7
    return {packed}
def unpack(found):
    return found[0] * found[1]
for step in range(4):
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = (net(torch.randn(6, 4)) - 1).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
"""


@pytest.mark.parametrize(
    ("packed", "is_lossy"),
    [("((tensor / step).round().to(torch.int8), step)", True), ("(tensor.clone(), 1.0)", False)],
)
def test_what_hooks_on_saved_tensors_lose_is_measured(packed, is_lossy, tmp_path):
    path = tmp_path / "packed.py"
    path.write_text(PACKED.format(packed=packed))
    result, _ = audited(path)
    assert result.verdict == "holds", result
    assert sum(result.again.values()) >= 3, result
    names = {one.name for one in result.named_findings}
    assert names == ({"packed-tensors"} if is_lossy else set()), result
    failing, _ = audited(path, fail_on=["packed-tensors"])
    expected = pytest.raises(gradcheck_suite.ViolationFound) if is_lossy else nullcontext()
    with expected:
        failing.raise_for_violation()
