"""Sound scripts are not blamed and faulty ones are named, in every dtype.

The parameters are what they are without an audit.
"""

from __future__ import annotations

import pytest
import torch

from tests.auditing.running import audited, trained
from tests.auditing.scripts import SCRIPTS

SOUND, FAULTY, UNJUDGED = (
    {name: script.said for name, script in SCRIPTS.items() if script.verdict == verdict}
    for verdict in ("holds", "violated", "unjudged")
)
DTYPES = ("float32", "bfloat16", "float64")
COARSE = DTYPES[:2]
"""What is found within their bounds is found within those of float64, too."""


def _found_in(names, dtypes=COARSE):
    """Run the scripts in one dtype each, in turn; those marked `full` also in the others."""
    scripts = [(name, dtypes[i % len(dtypes)]) for i, name in enumerate(names)]
    others = [(name, tuple(dtype for dtype in DTYPES if dtype != first)) for name, first in scripts]
    return pytest.mark.parametrize(
        ("name", "dtypes"),
        [
            *(pytest.param(name, (first,), id=f"{name}-{first}") for name, first in scripts),
            *(
                pytest.param(name, rest, id=f"{name}-{'-'.join(rest)}", marks=pytest.mark.full)
                for name, rest in others
            ),
        ],
    )


def _parameters(names):
    found = [module for module in names.values() if isinstance(module, torch.nn.Module)]
    return [p.detach().clone() for module in found for p in module.parameters()]


@pytest.mark.share(4)
@_found_in(SOUND, DTYPES)
def test_a_sound_script_is_not_blamed_and_its_parameters_are_equal_to_the_bit_without_an_audit(
    name, dtypes, scripts
):
    path = scripts / f"{name}.py"
    torch.manual_seed(0)
    without, state = _parameters(trained(path, dtypes[0])), torch.get_rng_state()
    assert without
    for dtype in dtypes:
        torch.manual_seed(0)
        result, names = audited(path, dtype)
        assert result.verdict == "holds", (dtype, result)
        assert result.windows >= result.steps - 1, (dtype, result)
        if dtype == dtypes[0]:
            assert all(map(torch.equal, without, _parameters(names)))
            assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("script", "is_named"), [("sound_cached_features", True), ("sound_memory_bank", False)]
)
def test_a_parameter_outside_of_cached_items_is_named_where_the_passes_have_the_same_items(
    script, is_named, scripts
):
    result, _ = audited(scripts / f"{script}.py", "float64")
    said = "the gradient of logit_scale arrives from each of the 4 passes over the same items"
    assert any(said in text for text in result.findings) == is_named, result


@pytest.mark.share(4)
@_found_in(UNJUDGED)
def test_what_cannot_be_judged_is_said(name, dtypes, scripts):
    for dtype in dtypes:
        result, _ = audited(scripts / f"{name}.py", dtype)
        assert result.verdict == "unjudged", (dtype, result)
        assert UNJUDGED[name][0] in result.unjudged, (dtype, result)


@pytest.mark.share(4)
@_found_in(FAULTY)
def test_a_faulty_script_is_named(name, dtypes, scripts):
    for dtype in dtypes:
        result, _ = audited(scripts / f"{name}.py", dtype)
        assert result.violation is not None, (dtype, result)
        named = [violation.diagnosis for violation in result.violations]
        assert named == [*FAULTY[name]], (dtype, result)
        assert f"{name}.py:" in result.violation.where


def test_a_backward_that_only_some_windows_have_is_a_finding(tmp_path, monkeypatch, scripts):
    monkeypatch.syspath_prepend(str(scripts))
    script = tmp_path / "stray.py"
    stray = "    odd = not vars().get('odd')\n    if odd:\n        F.cross_entropy(model(x), y).backward()\n"
    text = (scripts / "sound_equal.py").read_text()
    script.write_text(text.replace("    optimizer.step()", stray + "    optimizer.step()", 1))
    result, _ = audited(script)
    said = "stray.py:14: backward is called here in 2 of 3 windows"
    assert any(said in finding for finding in result.findings), result


BY_ONE_INSTRUMENT = {
    "weights": "faulty_mean_of_means",
    "sums": "faulty_never_reset",
    "batch": "faulty_left_in_evaluation_mode",
}
"""Each instrument -> a script whose fault it finds alone."""


@pytest.mark.parametrize("off", BY_ONE_INSTRUMENT)
def test_without_an_instrument_the_others_find_what_they_find(off, scripts):
    assert audited(scripts / "sound_equal.py", without=(off,))[0].holds
    for instrument, script in BY_ONE_INSTRUMENT.items():
        result, _ = audited(scripts / f"{script}.py", without=(off,))
        named = [violation.diagnosis for violation in result.violations]
        assert named == [*FAULTY[script]] * (instrument != off), result


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("finding_declared_denominator", "is divided by all its elements, more than its targets"),
        (
            "finding_declared_denominator_of_chunks",
            "is divided by all its elements, more than its targets",
        ),
        ("sound_boxes", "(padding or shifted labels counted?)"),
        (
            "finding_autoencoder_undivided",
            "nothing is to be done; else it is the sum of 4 means, never divided",
        ),
    ],
)
def test_a_weight_that_two_readings_explain_is_a_finding(script, said, scripts):
    result, _ = audited(scripts / f"{script}.py")
    assert any(said in finding for finding in result.findings), result


@pytest.mark.parametrize(
    ("script", "times"),
    [
        ("faulty_short_window_of_a_coefficient", 3 / 4),
        ("faulty_short_window_divided_at_its_end", 2 / 4),
    ],
)
def test_the_size_of_a_fault_has_no_coefficient_in_it_and_has_a_division_of_the_sum(
    script, times, scripts
):
    violation = audited(scripts / f"{script}.py")[0].violation
    assert violation.error == pytest.approx(1 - times)
    assert all(row.observed / row.expected == pytest.approx(times) for row in violation.weights)
    assert (
        f"every item of the window weighs {4 * times:g}/4 of what it should: "
        in violation.explanation
    )


def test_of_two_losses_the_one_that_is_not_divided_is_named_by_its_line_and_no_divisor_is_claimed(
    scripts,
):
    script = scripts / "faulty_second_loss_undivided.py"
    violation = audited(script)[0].violation
    line = 1 + next(
        i for i, text in enumerate(script.read_text().splitlines()) if "second =" in text
    )
    assert violation.where.endswith(f"faulty_second_loss_undivided.py:{line}")
    assert "of the term Mean(Abs) weighs 0.4 as in windows of 4" in violation.explanation
    assert "divide a short window by its own number" in violation.explanation
    assert "divided by" not in violation.explanation


def test_a_factor_of_the_loss_is_in_the_weights_that_are_expected(scripts):
    (violation,) = audited(scripts / "faulty_distilled.py")[0].violations
    assert violation.occurrences == 2  # of two losses in each of two steps
    ratios = [row.observed / row.expected for row in violation.weights]
    assert ratios == pytest.approx([14 / (4 * n) for n in (4, 2, 7, 1)])
    assert violation.explanation.startswith("each micro-batch's mean has weight 1/4,")


def test_the_sign_that_most_micro_batches_have_is_the_objectives_and_another_one_is_in_the_weights(
    scripts,
):
    violation = audited(scripts / "faulty_sign_flipped.py")[0].violation
    assert [row.observed / row.expected for row in violation.weights] == pytest.approx(
        [-1, 1, 1, 1]
    )
    assert violation.error == pytest.approx(2)
    assert "with the same sign" in violation.explanation


def test_a_micro_batch_without_items_counts_among_the_means(scripts):
    violation = audited(scripts / "faulty_no_active_items.py")[0].violation
    assert violation.explanation.startswith("each micro-batch's mean has weight 1/4,")
    ratios = [row.observed / row.expected for row in violation.weights]
    assert ratios == pytest.approx([5 / (4 * n) for n in (2, 1, 2)])


@pytest.mark.parametrize(
    "script", ["sound_mixup", "sound_packed_sequences", "sound_sample_weights"]
)
def test_weights_that_are_hard_to_read_are_judged(script, scripts):
    """An audit that only skipped them would hold, too."""
    result, _ = audited(scripts / f"{script}.py")
    assert not result.unknown, result
    assert result.windows == result.steps


@pytest.mark.parametrize(
    ("script", "calls"), [("sound_lbfgs", 2), ("sound_sharpness_aware_optimizer", 3)]
)
def test_a_step_that_calls_its_closure_several_times_or_steps_an_inner_optimizer_is_one(
    script, calls, scripts
):
    for most in (None, 1):
        result, _ = audited(scripts / f"{script}.py", steps=most)
        assert (result.verdict, result.windows, result.steps) == (
            "holds",
            most or calls,
            most or calls,
        ), result


@pytest.mark.parametrize(
    ("script", "may_be"), [("sound_halved", True), ("sound_mean_of_two_kinds_of_loss", False)]
)
def test_a_half_that_may_be_a_second_division_by_two_is_a_finding_unless_two_losses_add_up_to_1(
    script, may_be, scripts
):
    result, _ = audited(scripts / f"{script}.py")
    assert result.holds
    assert (
        any("divided twice by its 2 micro-batches" in finding for finding in result.findings)
        == may_be
    ), result


@pytest.mark.parametrize("script", ["sound_autoencoder_annealed", "faulty_tail_leaks"])
def test_what_only_later_windows_show_is_told_under_no_other_name_before(script, scripts, capsys):
    audited(scripts / f"{script}.py")
    assert "wrong-scale" not in capsys.readouterr().err


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("reset", ["", "optimizer.zero_grad()"])
def test_a_step_that_leaks_is_told_from_a_factor_where_gradients_are_parallel(
    tmp_path, reset, size
):
    script = tmp_path / "parallel.py"
    script.write_text(
        "import torch\n"
        f"model = torch.nn.Linear({size}, 1, bias=False)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(2):\n"
        f"    loss = torch.nn.functional.l1_loss(model(torch.ones(4, {size})), torch.full((4, 1), 9.0))\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        f"    {reset}\n"
    )
    result, _ = audited(script)
    assert [v.diagnosis for v in result.violations] == ([] if reset else ["stale-window"]), result
