"""The window again: how it is computed, what it finds, what it leaves alone, and how small an error it sees."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

import gradcheck_suite
from gradcheck_suite.__main__ import main
from tests.auditing.running import audited

HOW = {
    "sound_counted": {"in one batch": 1},
    "sound_model_returns_its_loss": {"micro-batch by micro-batch": 1},
    "sound_normalized_batches": {"micro-batch by micro-batch": 1},
    "sound_dropout": {"micro-batch by micro-batch": 1},
    "sound_evaluation_mode_of_a_part": {"micro-batch by micro-batch": 1},
    "sound_inputs_in_one_buffer": {"in one batch": 1},
    "sound_shared_module": {"in one batch": 1},
    "sound_averaged_weights_swapped_back": {"in one batch": 1},
    "sound_compiled_model": {},
    "sound_sharpness_aware": {},
    "sound_tied_and_frozen": {},
}
"""Script -> how its windows are computed again, and how many."""
REASONS = {
    "sound_inputs_in_one_buffer": "changed in place",
    "sound_compiled_model": "the model is compiled",
    "sound_sharpness_aware": "parameters were written",
    "sound_tied_and_frozen": "outside of the recorded calls",
}
"""Script -> a part of the reason why a window was not computed again."""


@pytest.mark.parametrize("name", HOW)
def test_it_is_said_how_a_window_was_computed_again_or_why_not(name, scripts):
    result, _ = audited(scripts / f"{name}.py")
    assert (result.verdict, result.again) == ("holds", HOW[name]), result
    said = [finding for finding in result.findings if "not computed again" in finding]
    assert len(said) == (name in REASONS)
    assert all(REASONS[name] in finding for finding in said), said


def test_the_first_window_and_every_third_after_it(tmp_path, scripts):
    path, script = tmp_path / "r.json", str(scripts / "sound_halved.py")
    for options, expected in (
        (["--every", "3"], {"in one batch": 2}),
        (["--every", "1"], {"in one batch": 4}),
        (["--without", "batch"], {}),
        (["--without", "weights", "--without", "sums"], {"in one batch": 1}),
    ):
        assert main(["audit", *options, "--json", str(path), script]) == 0, options
        assert json.loads(path.read_text())["results"][0]["again"] == expected, options


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
    assert [(v.diagnosis, v.step) for v in result.violations] == [("mixed-modes", found)] * (found is not None)


def _window(sizes, dtype, weight):
    """Train one window and return the model, its gradient, and the gradient of one batch of all items."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)
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


SMALLEST = {torch.float32: 1e-4, torch.float64: 1e-13}
"""A relative change of one layer's gradient that is found; a hundredth of it is rounding."""


@pytest.mark.parametrize("dtype", SMALLEST)
def test_a_small_change_by_a_backward_hook_is_found_and_rounding_is_not(dtype):
    for factor, found in ((30 * SMALLEST[dtype], True), (SMALLEST[dtype] / 1000, False)):
        model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)
        model[1].register_full_backward_hook(lambda m, i, o, factor=factor: (i[0] * (1 + factor),))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with gradcheck_suite.audit() as audit:
            for _ in range(3):
                F.cross_entropy(model(torch.randn(4, 5, dtype=dtype)), torch.tensor([0, 1, 2, 1])).div(3).backward()
            optimizer.step()
        said = [finding for finding in audit.result.findings if "a backward hook on a module (1)" in finding]
        assert (audit.result.verdict, bool(said)) == ("holds", found), (factor, audit.result)


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
        gradients, statistics = [p.grad.clone() for p in model.parameters()], model[1].running_mean.clone()
        random = torch.get_rng_state()
        optimizer.step()
    assert audit.result.again == {"micro-batch by micro-batch": 1}
    assert sorted(calls) == ["module"] * 2 + ["parameter"] * 2
    assert capsys.readouterr().out == "forward\n" * 2
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    assert torch.equal(statistics, model[1].running_mean)
    assert torch.equal(random, torch.get_rng_state())
    assert model[1].num_batches_tracked == 2
