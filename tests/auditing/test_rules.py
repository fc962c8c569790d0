"""Every rule of the audit's tables fires on some script, none outranks one that outranks it, and of
two faults that hold it is said which one stands.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gradcheck_suite.auditing import judge, scales, weighing
from gradcheck_suite.auditing.events import PassRecord, StepRecord
from gradcheck_suite.auditing.evidence import evidence_of
from gradcheck_suite.auditing.places import Place
from gradcheck_suite.auditing.replay import BackwardPass, StepWindow
from gradcheck_suite.auditing.rules import Need, Rule, decide
from gradcheck_suite.auditing.scales import READINGS, SCALE_RULES, ObjectiveRun, UseInRun
from gradcheck_suite.auditing.step_rules import OF_COPIES, PER_PASS, STEP_RULES, StepEvidence
from gradcheck_suite.auditing.sums import RULES
from gradcheck_suite.auditing.weighing import OF_LOSSES
from tests.auditing.evidence_scripts import EVIDENCE
from tests.auditing.reported import REPORTED
from tests.auditing.rule_scripts import RULED, START
from tests.auditing.running import audited
from tests.auditing.scripts_with_truth import WITH_TRUTH

TABLES = {"step": STEP_RULES, "sum": RULES, "losses": OF_LOSSES, "coefficient": SCALE_RULES}
NAMES = [rule.name for table in (*TABLES.values(), [PER_PASS]) for rule in table]
STATED = {"faulty_shorter_than_stated": 4, "faulty_step_per_pass": 4}
"""Scripts for which the user states the accumulation steps."""
SHOWN = {
    # own scripts
    "faulty_second_step": "empty window",
    "faulty_pass_of_another_optimizer": "another optimizer's pass",
    "sound_results_after_another_optimizer": "another's passes",
    "sound_discarded_window": "whole window",
    "faulty_noise_between": "edited between",
    "faulty_clipped_to_nothing": "clipped off",
    "faulty_head_clipped_between": "clipped in some",
    "faulty_clipped_between": "clipped each time",
    "faulty_scaled_between": "changed each time",
    "faulty_expert_reset": "dropped",
    "faulty_backward_twice": "repeated",
    "faulty_zeroed_before_step": "all reset",
    "faulty_replaced_layer": "replaced",
    "faulty_overlapping_gradients": "overlapping gradients",
    "faulty_fewer_at_the_second_point": "fewer at the second point",
    "sound_plain_sum": "plain sum",
    "finding_clipped_before_unscaling": "scaled and clipped",
    "sound_unscaled_by_hand": "scaled by the program, coefficient",
    "faulty_factor_left_out": "left in",
    "faulty_factor_left_in": "lacking factor, right",
    "faulty_begun_anew": "window begun anew",
    "faulty_shorter_than_stated": "short of configured",
    "faulty_step_per_pass": "step per pass",
    "faulty_reset_inside_after_single_passes": "last passes, whole window",
    "sound_skipped_single_passes": "whole window",
    "faulty_count_of_nothing": "wrong count",
    "faulty_missing_step": "missing step",
    "finding_constant_count": "coefficient",
    "finding_frozen_column": "masked",
    "faulty_masked_once": "masked in some",
    "faulty_scaler_of_two_optimizers": "scaled unequally",
    # those of other tests
    "sound_curvature_last": "before the first step",
    "sound_begun_anew_by_less": "begun anew",
    "sound_window_tried_again": "begun anew after an exception",
    "sound_coefficient_grows_within_windows": "beside right losses",
    "faulty_own_buffer_never_zeroed": "buffer",
    "faulty_hook_clamps": "changing hook",
    "faulty_clipped_inside": "clipped between",
    "sound_signs_that_agree": "copies",
    "sound_helper_to_look_at": "discarded pass",
    "sound_autoencoder_annealed": "divided again, unclear factor",
    "faulty_never_reset_since_unfrozen": "earlier window",
    "faulty_noise_never_reset": "edited",
    "sound_kept_buffer": "fitted",
    "faulty_hook_set_again": "hook again, fixed hook",
    "sound_window_given_up": "given up",
    "faulty_handed_over_once": "handed over once",
    "sound_boxes": "miscounted",
    "faulty_written_by_data": "moved",
    "faulty_second_head_steps_each_micro_batch": "moved by another",
    "sound_skipped_bad_windows": "not finite",
    "finding_declared_denominator": "other count",
    "faulty_count_of_the_window_before": "planned count, wrong count",
    "faulty_doubled_buffer": "rescaled by the program",
    "faulty_scaled_accumulator": "rescaled each time",
    "faulty_halved_after_each_micro_batch": "rescaled in some",
    "faulty_tied_parameter_reset": "reset in some",
    "faulty_tail_dropped": "rest of an epoch",
    "sound_difference_of_two_results": "results written",
    "faulty_running_loss": "running sum",
    "sound_masked": "same in other windows",
    "faulty_stepped_on_zeros": "step on zeros",
    "faulty_left_scaled": "still scaled",
    "sound_stopped": "stopped",
    "finding_always_removed": "taken away",
    "faulty_micro_batch_tried_again": "torn",
    "sound_sharpness_aware": "two points",
    "faulty_second_loss_undivided": "undivided, other length",
    "faulty_replays_by_place": "unequal replays",
    "faulty_overwritten": "written over",
    "faulty_last_result_left_out": "left out",
    "faulty_running_count_of_losses": "running count",
    "faulty_rows_of_padding": "wrong factor",
    "faulty_gradients_exchanged": "misplaced",
    "faulty_copied_by_hand": "copied",
    "faulty_mask_of_last": "left of the last",
    "faulty_one_line_is_not_scaled": "not scaled",
    "faulty_divided_by_the_count_of_the_last": "count of the last",
    "finding_first_line_is_not_divided": "undivided elsewhere",
}
"""A script -> rules that fire on it."""
ELSEWHERE = {"local"}
"""Rules of several ranks, which no script of one process shows."""
MISSING = {
    "unjudged_all_frozen": "frozen-parameters",
    "sound_stepped_on_zeros": "no-pass",
    "unjudged_written_noise": "unlike-gradient",
    "unjudged_written_signs": "unlike-gradient",
    "unjudged_scripted_backward": "unseen-pass",
    "unjudged_optimizer_of_copies": "unstepped-parameters",
    "unjudged_by_func_grad": "written-gradient",
}
"""A script -> the evidence that it lacks, by the name of the reason."""


@pytest.fixture
def path_of(scripts, tmp_path):
    """Return the file of a script of any table."""

    def path(name):
        texts = {
            **{one: script.text for one, script in EVIDENCE.items()},
            **{one: script.text for one, (script, _) in REPORTED.items()},
            **{one: START + text for one, text in RULED.items()},
            **WITH_TRUTH,
        }
        if name not in texts:
            return scripts / f"{name}.py"
        file = tmp_path / f"{name}.py"
        file.write_text(texts[name])
        return file

    return path


@pytest.fixture
def decided(monkeypatch):
    """The decisions of an audit."""
    found = []

    def kept(rules, evidence):
        found.append(decide(rules, evidence))
        return found[-1]

    for module in (judge, weighing, scales):
        monkeypatch.setattr(module, "decide", kept)
    return found


def _audited(path, name):
    options = {"accumulation_steps": STATED[name]} if name in STATED else {}
    return audited(path, **options)[0]


@pytest.mark.parametrize("table", TABLES)
def test_a_rule_outranks_rules_that_follow_it_so_that_there_is_no_circle(table):
    names = [rule.name for rule in TABLES[table]]
    for at, rule in enumerate(TABLES[table]):
        assert {*rule.before} <= {*names[at + 1 :]}, rule.name


def test_every_rule_has_a_name_of_its_own_and_a_script_that_shows_it():
    shown = {name for names in SHOWN.values() for name in names.split(", ")}
    assert len({*NAMES}) == len(NAMES)
    assert shown | ELSEWHERE == {*NAMES}
    assert {*RULED} <= {*SHOWN}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.share(6)
@pytest.mark.parametrize("name", SHOWN)
def test_a_rule_fires_on_its_script_and_no_other_fault_beside_it(name, path_of, decided):
    result = _audited(path_of(name), name)
    assert (result.verdict == "violated") == name.startswith("faulty"), result
    fired = {held.rule.name for one in decided for held in one.held}
    assert fired >= {*SHOWN[name].split(", ")}
    if name.startswith("finding") and name in RULED:
        assert result.named_findings, result
    # where two faults hold, one outranks the other
    for one in decided:
        assert sum(held.rule.is_fault for held in one.held) < 2, one.held


@pytest.mark.filterwarnings("ignore")
@pytest.mark.share(6)
@pytest.mark.parametrize("name", MISSING)
def test_evidence_that_is_missing_is_a_reason_by_name(name, path_of, decided):
    _audited(path_of(name), name)
    assert MISSING[name] in {one.missing.reason for one in decided if one.missing}


def test_zero_of_deepspeed_is_a_reason_of_its_own():
    step = StepRecord(0, Place("train.py:1", ()), {0: np.ones(4)}, 0, trainer="deepspeed.runtime")
    evidence = StepEvidence(_window(step), None, (), has_unseen=False, is_stepped=lambda _: False)
    assert decide(STEP_RULES, evidence).missing is OF_COPIES[0]


def _window(step, **more):
    fields = {
        "optimizer": 0,
        "number": 0,
        "step": step,
        "passes": {},
        "keys": [0],
        "coefficients": {},
        "factor": 1.0,
        "edit": None,
        "seen": {},
        "first": True,
        "before": 0,
        "local": (),
        "null": set(),
        "zero": set(),
        "not_finite": set(),
    }
    return StepWindow(**{**fields, **more})


@pytest.mark.parametrize("local", [(), (0,)])
def test_a_gradient_that_is_not_reduced_over_the_ranks_is_seen(local):
    place = Place("train.py:1", ())
    step = StepRecord(0, place, {0: np.ones(4)}, 0)
    records = [PassRecord(place, accumulates=True, arrivals={0: "none"}) for _ in range(2)]
    own = _window(
        step,
        passes={0: BackwardPass(records)},
        coefficients={0: {(0, 0): 1.0}},
        seen={0: {}},
        local=local,
    )
    held = [one.rule.name for one in decide(RULES, evidence_of(own)).held]
    assert held == (["local"] if local else [])


def test_a_rule_that_is_outranked_is_not_asked_and_what_it_needs_is_no_reason():
    asked = []

    def holds(evidence):
        asked.append(evidence)
        return True

    need = Need("no-pass", "nothing", lambda evidence: True)
    first = Rule("first", "discarded-pass", lambda evidence: True, before=("second",))
    second = Rule("second", "stale-window", holds, needs=(need,))
    both = decide([first, second], 1)
    assert [one.rule.name for one in both.held] == ["first"]
    assert both.missing is None
    assert not asked
    assert decide([second], 1).missing is need


def _use(own, length, *, mean=True):
    """Return a loss of one target for each micro-batch."""
    return SimpleNamespace(
        length=length,
        own=own,
        total=None,
        others=(),
        masses=[own / length] * length,
        items=4.0 * length,
        is_mean=mean,
        whole=True,
        right=False,
        window=SimpleNamespace(edit=None, left=1.0, divided=None),
        objective=SimpleNamespace(
            tolerance=1e-5,
            weight=own / (4 * length),
            parts=[SimpleNamespace(term=SimpleNamespace(by_data=False))],
            is_divided_by=lambda number: False,
        ),
    )


@pytest.mark.parametrize(
    ("at", "own", "length", "ranks", "mean", "cause"),
    [
        (0, 3.0, 3, 1, True, "not-divided"),
        (1, 6.0, 3, 2, True, "not-divided"),
        (2, 1 / 3, 3, 1, True, "divided-twice"),
        (3, 2.0, 3, 2, True, "ranks"),
        (4, 0.5, 3, 2, True, "ranks"),
        (5, 0.5, 2, 1, False, "divided-twice"),
    ],
)
def test_a_factor_of_a_window_has_the_cause_that_verify_names(at, own, length, ranks, mean, cause):
    use = _use(own, length, mean=mean)
    read = UseInRun(use, ObjectiveRun([use], ranks, None)).reading
    assert (read.cause, read.fits) == (cause, 1)
    assert read.why == READINGS[at].says.format(r=length, ranks=ranks)
    assert read.value == pytest.approx(own)
    # a number that is none of the run's has no meaning
    other = _use(own * 1.37, length, mean=mean)
    assert UseInRun(other, ObjectiveRun([other], ranks, None)).reading is None
