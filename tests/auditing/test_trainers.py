"""Ordinary training scripts of several libraries, unchanged: each gets the verdict that is true of
it.

What is true of each follows from what it divides by. Accelerate and Lightning divide by K, also in
a short last window. Llama divides by the targets of the window. GPT-2 divides by them and one more
for each row, whatever the number of micro-batches, which is a finding. BERT's classifier divides by
the rows of the micro-batch alone.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from gradcheck_suite.auditing.callbacks import lightning_callback, transformers_callback
from tests.auditing.running import audited, audited_on_two_ranks

MISCOUNTED = "(padding or shifted labels counted?)"
PLAIN = {
    ("timm_like",): "wrong-scale",
    ("timm_like", "--repaired"): None,
    ("timm_like", "--batches", "8"): None,
}
"""Script with its arguments -> the diagnosis, or None where it holds."""
WITH_A_LIBRARY = {
    ("accelerate_loop",): ("accelerate", None),
    ("accelerate_loop", "--samples", "40"): ("accelerate", "wrong-scale"),
    ("accelerate_loop", "--samples", "8"): ("accelerate", "wrong-scale"),
    ("accelerate_recipe",): ("transformers", None),
    ("accelerate_recipe", "--as-printed"): ("transformers", MISCOUNTED),
    ("fabric_loop",): ("lightning", None),
    ("ignite_trainer",): ("ignite", None),
    ("ignite_trainer", "--batches", "9"): ("ignite", "tail-dropped"),
    ("ignite_trainer", "--unequal"): ("ignite", "mean-of-means"),
    ("lightning_trainer",): ("lightning", None),
    ("lightning_trainer", "--batches", "10"): ("lightning", "wrong-scale"),
    ("lightning_trainer", "--batches", "2"): ("lightning", "wrong-scale"),
    ("torchtnt_unit",): ("torchtnt", None),
    ("torchtnt_unit", "--batches", "10"): ("torchtnt", "wrong-scale"),
    ("transformers_trainer", "llama"): ("transformers", None),
    ("transformers_trainer", "llama", "--left", "--rows", "13"): ("transformers", None),
    ("transformers_trainer", "llama", "--lora"): ("peft", None),
    ("transformers_trainer", "gpt2"): ("transformers", "wrong-count"),
    ("transformers_trainer", "gpt2", "--lora"): ("peft", "wrong-count"),
    ("transformers_trainer", "bert"): ("transformers", "wrong-scale"),
    ("transformers_trainer", "bert", "--lora"): ("peft", "wrong-scale"),
    ("trl_trainer", "sft", "llama"): ("trl", None),
    ("trl_trainer", "dpo", "llama"): ("trl", None),
    ("trl_trainer", "reward", "llama"): ("trl", None),
    ("trl_trainer", "sft", "gpt2"): ("trl", "wrong-count"),
    ("trl_trainer", "sft", "llama", "--lora"): ("peft", None),
}
"""Script with its arguments -> the library that it needs, and the diagnosis, or a finding of several words."""
ON_TWO_RANKS = {
    ("accelerate_loop",): ("accelerate", None),
    ("accelerate_loop", "--samples", "40"): ("accelerate", "wrong-scale"),
    ("accelerate_recipe",): ("transformers", None),
    ("accelerate_recipe", "--as-printed"): ("transformers", MISCOUNTED),
    ("fabric_loop",): ("lightning", None),
    ("fabric_loop", "--own-count"): ("lightning", "mean-of-means"),
    ("lightning_trainer",): ("lightning", None),
    ("lightning_trainer", "--batches", "10"): ("lightning", "wrong-scale"),
    ("transformers_trainer", "llama"): ("transformers", None),
    ("transformers_trainer", "llama", "--own-count"): ("transformers", "mean-of-means"),
    ("transformers_trainer", "gpt2"): ("transformers", "the loss has a coefficient"),
    ("transformers_trainer", "bert"): ("transformers", "wrong-scale"),
}
"""Likewise on two ranks, whose gradients are averaged: Accelerate and Lightning leave each rank its own mean, so equal
counts are right; transformers' Trainer divides by the targets of all ranks, unless it is told not to."""
UNJUDGED = {
    ("keras_fit",): ("keras", "without a torch.optim optimizer"),
}
"""Script with its arguments -> the library that it needs, and a part of the reason why nothing is judged."""


@pytest.mark.parametrize(
    ("command", "diagnosis"), PLAIN.items(), ids=lambda x: " ".join(x) if x else "holds"
)
def test_a_plain_script(command, diagnosis, scripts):
    script, *arguments = command
    result, _ = audited(scripts / "trainers" / f"{script}.py", *arguments)
    assert result.windows == result.steps
    assert [violation.diagnosis for violation in result.violations] == [diagnosis] * (
        diagnosis is not None
    ), result


def _audited_alone(library, command, path, scripts):
    """Return the status, the result and the standard error of the command, or skip without the
    library.
    """
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    script, *arguments = command
    script = scripts / "trainers" / f"{script}.py"
    audit = [
        sys.executable,
        "-m",
        "gradcheck_suite",
        "audit",
        "--json",
        str(path),
        str(script),
        *arguments,
    ]
    done = subprocess.run(audit, capture_output=True, text=True, timeout=300)
    (result,) = json.loads(path.read_text())["results"]
    return done.returncode, result, done.stderr


def _expect(result, expected):
    """Check a result against a diagnosis, a finding or None, and return the status of its command."""
    finding = expected is not None and " " in expected
    assert not finding or any(expected in one for one in result["findings"]), result
    assert (result["violation"] or {}).get("diagnosis") == (None if finding else expected), result
    return int(expected is not None and not finding)


@pytest.mark.parametrize(("command", "expected"), WITH_A_LIBRARY.items(), ids=str)
def test_a_script_of_a_library(command, expected, tmp_path, scripts):
    library, expected = expected
    status, result, said = _audited_alone(library, command, tmp_path / "result.json", scripts)
    assert status == _expect(result, expected), said
    assert f"{result['windows']} steps judged of {result['windows']}" in said


@pytest.mark.full
@pytest.mark.parametrize(("command", "expected"), ON_TWO_RANKS.items(), ids=str)
def test_a_script_of_a_library_on_two_ranks(command, expected, tmp_path, scripts):
    library, expected = expected
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    script, *arguments = command
    path = scripts / "trainers" / f"{script}.py"
    result, ended = audited_on_two_ranks(path, tmp_path / "result.json", *arguments)
    status = _expect(result, expected)
    assert (result["windows"], result["ranks"]) == (result["steps"], 2), result
    assert [status for _, status in ended] == [status, 0], ended


@pytest.mark.parametrize(("command", "expected"), UNJUDGED.items(), ids=str)
def test_a_script_whose_loss_or_optimizer_is_a_librarys_own_is_unjudged(
    command, expected, tmp_path, scripts
):
    library, reason = expected
    status, result, said = _audited_alone(library, command, tmp_path / "result.json", scripts)
    assert (status, result["verdict"]) == (2, "unjudged"), said
    assert reason in said.splitlines()[-1]


@pytest.mark.filterwarnings("default")
def test_the_callback_of_lightning():
    lightning = pytest.importorskip(
        "lightning", reason="needs lightning: pip install '.[lightning]'"
    )

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, index):
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    for batches, verdict in ((4, "holds"), (5, "violated")):
        callback = lightning_callback()
        trainer = lightning.Trainer(
            max_epochs=1,
            accumulate_grad_batches=4,
            accelerator="cpu",
            callbacks=[callback],
            **dict.fromkeys(quiet, False),
        )
        data = torch.utils.data.TensorDataset(
            torch.randn(batches * 2, 2), torch.randn(batches * 2, 1)
        )
        trainer.fit(Regression(), torch.utils.data.DataLoader(data, batch_size=2))
        assert callback.audit.result.verdict == verdict, callback.audit.result
    assert "Lightning#19987" in callback.audit.result.violation.explanation


@pytest.mark.filterwarnings("default")
def test_the_callback_of_transformers(tmp_path):
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: pip install '.[transformers]'"
    )
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 20, (8, 5))]
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=1, **sizes))
    for divided_twice, verdict in ((False, "holds"), (True, "violated")):
        callback = transformers_callback()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4,
            max_steps=2,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
        )
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=rows, callbacks=[callback]
        )
        if divided_twice:
            trainer.model_accepts_loss_kwargs, trainer.compute_loss_func = False, None
            trainer.loss_is_scaled_for_ga = True
        trainer.train()
        assert callback.audit.result.verdict == verdict, callback.audit.result
