"""transformers' Trainer, old and new: what it gets right, what it gets wrong, and by which name."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[transformers]'")

from gradcheck_suite import CannotRunHere, Case, Plan, check
from gradcheck_suite.__main__ import main
from gradcheck_suite.cli.loading import resolve_problem
from gradcheck_suite.core.contract import Problem
from gradcheck_suite.loops.trainers import TRAINERS
from gradcheck_suite.loops.trainers.models import llama, next_tokens, seeded_model
from gradcheck_suite.loops.trainers.problems import MEAN
from gradcheck_suite.loops.trainers.trainer import PADDED_ROWS, PLANS, SMOOTHED
from tests.loops.trainers.expecting import at_version, cells, diagnosis, from_version

OLD = at_version("transformers", "4.45.2")
# a release that does otherwise is news
NEW = from_version("transformers", "5.23.0")
# equal counts, unequal counts, short last window, epoch shorter than K, several epochs, sum loss
BY_K = (None, "mean-of-means", "wrong-windows", "mean-of-means", None, "wrong-scale")
RIGHT = (None,) * len(PLANS)
BY_LENGTH = (None, "mean-of-means", None, None, None, "wrong-scale")
IN_OLD = {"hf-trainer": BY_K, "hf-trainer-plain": BY_K}
IN_NEW = {
    "hf-trainer": BY_LENGTH,
    "hf-trainer-counted": RIGHT,
    "hf-trainer-loss-func": RIGHT,
    "hf-trainer-plain": BY_LENGTH,
}


@OLD
@pytest.mark.parametrize(("trainer", "question", "wanted"), cells(IN_OLD, PLANS))
def test_the_old_trainer(trainer, question, wanted):
    """transformers#24725, #22098: means of means.

    A short last window joins the next epoch's first.
    """
    assert diagnosis(trainer, question) == wanted


@OLD
@pytest.mark.parametrize("question", [*PADDED_ROWS, *SMOOTHED], ids=lambda question: question.name)
def test_the_old_trainer_on_padded_rows_takes_means_of_means(question):
    trainer = "hf-trainer-smoothing" if question in SMOOTHED else "hf-trainer"
    # in a run of one epoch, windows that run on into the next one are a tail that is never stepped
    names = "mean-of-means", "wrong-windows", "tail-dropped"
    assert diagnosis(trainer, question, examples=12, small=False) in names


@OLD
def test_the_old_trainer_takes_no_loss_function():
    with pytest.raises(CannotRunHere, match=r"takes no compute_loss_func: use 4\.46 or later"):
        check(TRAINERS["hf-trainer-loss-func"].load(), Case("dense", Plan((1,), 1)), problem=MEAN)


@OLD
def test_the_old_trainer_is_named_on_the_command_line(tmp_path):
    """As a user asks: every plan is drawn, and two of the trainer's faults show.

    That of whole windows comes first.
    """
    path = tmp_path / "result.json"
    command = [
        "verify",
        "hf-trainer",
        "--problem",
        "gradcheck_suite.loops.trainers.models:llama",
        "--examples",
        "20",
    ]
    assert main([*command, "--json", str(path), "--reports", str(tmp_path)]) == 1
    (result,) = json.loads(path.read_text())["results"]
    assert (result["violation"]["kind"], result["violation"]["diagnosis"]) == (
        "gradient",
        "mean-of-means",
    )


@NEW
def test_the_new_trainer_holds_on_the_command_line(tmp_path):
    command = [
        "verify",
        "hf-trainer",
        "--problem",
        "gradcheck_suite.loops.trainers.models:llama",
        "--examples",
        "20",
    ]
    assert main([*command, "--reports", str(tmp_path)]) == 0


@NEW
@pytest.mark.parametrize(("trainer", "question", "wanted"), cells(IN_NEW, PLANS))
def test_the_new_trainer(trainer, question, wanted):
    assert diagnosis(trainer, question) == wanted


@NEW
def test_the_new_trainer_holds_on_padded_rows():
    assert diagnosis("hf-trainer", PADDED_ROWS[0]) is None
    assert diagnosis("hf-trainer-smoothing", SMOOTHED[0], examples=3) is None


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_old_and_new_are_told_apart_by_one_case(name):
    """Two micro-batches of 1 and 3 padded rows."""
    problem = resolve_problem(f"gradcheck_suite.loops.trainers.models:{name}")
    verdict = check(TRAINERS["hf-trainer"].load(), Case(name, Plan((1, 3), 2)), problem=problem)
    old = TRAINERS["hf-trainer"].version.startswith("4.45")
    if old:
        assert verdict.violation.diagnosis == "mean-of-means"
    elif name == "llama":
        assert verdict.holds


@NEW
def test_the_new_trainer_counts_the_first_tokens_of_a_gpt2_too():
    """`loss_type` of a GPT2LMHeadModel is None, so the trainer does not see that its loss shifts
    the labels.
    """
    problem = resolve_problem("gradcheck_suite.loops.trainers.models:gpt2")
    violation = check(
        TRAINERS["hf-trainer"].load(), Case("gpt2", Plan((1, 3), 2)), problem=problem
    ).violation
    tokens = int(next_tokens(problem.batch(4, 0)))
    assert violation.diagnosis == "wrong-scale"
    assert f"{tokens}/{tokens + 4}" in violation.explanation
    assert "one target too many is counted for every item" in violation.explanation


@NEW
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        # of two rows each, micro-batches have different numbers of masked or valid tokens
        ("BertForMaskedLM", "mean-of-means"),
        ("T5ForConditionalGeneration", "mean-of-means"),
        ("BertForTokenClassification", "mean-of-means"),
        ("LlamaForSequenceClassification", "wrong-scale"),
    ],
)
def test_the_new_trainer_leaves_the_division_to_models_that_ignore_the_count(name, wanted):
    """transformers#47688: each mean has weight 1. Between equal counts that is a factor of K."""
    problem = resolve_problem(f"gradcheck_suite.loops.trainers.models:{name}")
    violation = check(
        TRAINERS["hf-trainer"].load(), Case(name, Plan((2, 2, 2), 3)), problem=problem
    ).violation
    assert violation.diagnosis == wanted
    said = {"mean-of-means": "mean has weight 1, whatever its count", "wrong-scale": "3 times"}
    assert said[wanted] in violation.explanation


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "ViTForImageClassification"])
@NEW
def test_the_new_trainer_holds_where_the_model_takes_the_count(name):
    problem = resolve_problem(f"gradcheck_suite.loops.trainers.models:{name}")
    assert check(
        TRAINERS["hf-trainer"].load(), Case(name, Plan((1, 2, 2), 2)), problem=problem
    ).holds


def wrapped(name, task, targets):
    """Return a problem whose model PEFT wraps, with adapters that change its outputs."""
    peft = pytest.importorskip("peft", reason="needs peft")
    own = resolve_problem(f"gradcheck_suite.loops.trainers.models:{name}")

    def model(seed):
        plain = own.model(seed)
        options = {"task_type": task, "r": 2, "target_modules": targets, "init_lora_weights": False}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return peft.get_peft_model(plain, peft.LoraConfig(**options))

    return Problem(model, own.batch, own.loss, count=own.count)


@NEW
@pytest.mark.filterwarnings("default")
def test_a_model_that_peft_wraps_is_trained_as_it_is():
    """transformers#47688 with LoRA: the gradient is K times too large.

    A Llama divides by the count.
    """
    hf_trainer = TRAINERS["hf-trainer"].load()
    bert = wrapped("BertForSequenceClassification", "SEQ_CLS", ["query", "value"])
    violation = check(hf_trainer, Case("bert", Plan((2, 2, 2), 3)), problem=bert).violation
    assert violation.diagnosis == "wrong-scale"
    assert "every item of the window weighs 3 times what it should" in violation.explanation
    violation = check(hf_trainer, Case("bert", Plan((1, 3, 2), 3)), problem=bert).violation
    assert violation.diagnosis == "mean-of-means"
    assert "each micro-batch's mean has weight 1, whatever its count" in violation.explanation
    llama = wrapped("LlamaForCausalLM", "CAUSAL_LM", ["q_proj", "v_proj"])
    assert check(hf_trainer, Case("llama", Plan((1, 3, 2), 3)), problem=llama).holds


def test_another_loss_than_the_models_own_is_refused():
    other = Problem(
        llama().model,
        llama().batch,
        lambda model, batch: 2 * model(**batch).loss,
        count=next_tokens,
    )
    with pytest.raises(CannotRunHere, match=r"let Problem.loss return model\(\*\*batch\).loss"):
        check(TRAINERS["hf-trainer"].load(), Case("other", Plan((1,), 1)), problem=other)


def test_a_batch_without_labels_is_refused():
    def rows(items, seed):
        batch = llama().batch(items, seed)
        return {"rows": batch.pop("labels"), **batch}

    other = Problem(
        llama().model,
        rows,
        lambda model, batch: (
            model(batch["input_ids"], batch["attention_mask"], labels=batch["rows"]).loss
        ),
        count=lambda batch: next_tokens({"labels": batch["rows"]}),
    )
    with pytest.raises(CannotRunHere, match="dictionaries with labels: pass such a problem"):
        check(TRAINERS["hf-trainer"].load(), Case("other", Plan((1,), 1)), problem=other)


def test_smoothing_refuses_models_of_other_people():
    with pytest.raises(CannotRunHere, match="pass a problem with one"):
        check(TRAINERS["hf-trainer-smoothing"].load(), Case("dense", Plan((1,), 1)), problem=MEAN)


def test_problems_are_the_same_for_the_same_seed():
    first, second, other = (
        seeded_model(lambda: torch.nn.Linear(2, 2))(seed).weight for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(llama().batch(3, 5)["labels"], llama().batch(3, 5)["labels"])


def test_targets_are_what_a_causal_model_predicts():
    labels = torch.tensor([[1, 2, 3, -100], [4, 5, -100, -100]])
    assert int(next_tokens({"labels": labels})) == 3
