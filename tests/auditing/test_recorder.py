"""Windows are held to the accumulation steps of the trainer that runs, also where every epoch is
shorter.
"""

from __future__ import annotations

import copy
import gc
import io
import linecache
import types
import weakref

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

import gradcheck_suite


def _optimizer_of(module, parameters, steps=1):
    """Return an optimizer whose `step` has a frame as that of a wrapper in this module."""
    module = types.ModuleType(module)
    exec(
        "class Wrapper:\n"
        "    def __init__(self, optimizer, state):\n"
        "        self.optimizer, self.gradient_state = optimizer, state\n"
        "    def step(self):\n"
        "        self.optimizer.step()\n",
        module.__dict__,
    )
    return module.Wrapper(
        torch.optim.SGD(parameters, lr=0.1), types.SimpleNamespace(num_steps=steps)
    )


def test_what_helps_is_said_of_flat_copies_and_of_those_of_zero():
    for module, said in (
        ("toy", "or step on the module's own"),
        (ZERO, "`zero_optimization.stage` 0"),
    ):
        model, flat = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.zeros(8))
        optimizer = _optimizer_of(module, [flat])
        with gradcheck_suite.audit() as audit:
            model(torch.ones(4, 3)).square().mean().backward()
            flat.grad = torch.cat([p.grad.flatten() for p in model.parameters()])
            optimizer.step()
        (part,) = audit.result.unknown
        assert said in part.remedy
        assert ("ZeRO" in part.reason) == (module == ZERO)
        assert audit.result.verdict == "unjudged"


ZERO = "deepspeed.runtime.zero.stage_1_and_2"


@pytest.mark.parametrize(
    ("steps", "length", "divisor", "diagnosis"),
    [
        (4, 2, 4, "wrong-scale"),
        (4, 1, 4, "wrong-scale"),
        (4, 2, 2, None),
        (4, 4, 4, None),
        (1, 2, 4, None),
    ],
)
def test_windows_that_are_all_short_are_held_to_the_steps_of_the_trainer(
    steps, length, divisor, diagnosis
):
    """What no trainer states reads as a coefficient."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = _optimizer_of("accelerate.optimizer", model.parameters(), steps)
    with gradcheck_suite.audit() as audit:
        for _ in range(3):
            for _ in range(length):
                loss = (
                    torch.nn.functional.mse_loss(model(torch.randn(4, 3)), torch.randn(4, 2))
                    / divisor
                )
                loss.backward()
            optimizer.step()
            optimizer.optimizer.zero_grad()
    found = audit.result.violation
    assert (found and found.diagnosis) == diagnosis, audit.result
    if found is not None:
        assert f"{length}/{steps}" in found.explanation
        assert (
            "`GradientAccumulationPlugin(num_steps=K, sync_with_dataloader=False)`"
            in found.explanation
        )


@pytest.mark.filterwarnings("default")
def test_transformers_trainer_is_held_to_its_steps_where_it_divides_by_them(tmp_path):
    """Releases before transformers#39659 divided by K also where an epoch is shorter.

    Newer ones divide by the number of its micro-batches.
    """
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: pip install '.[transformers]'"
    )

    class Dividing(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
            return super().training_step(*args, **kwargs)

    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 20, (2, 5))]
    for kind, verdict in ((transformers.Trainer, "holds"), (Dividing, "violated")):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(num_attention_heads=1, **sizes)
        )
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4,
            num_train_epochs=2,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
        )
        trainer = kind(model=model, args=arguments, train_dataset=rows)
        trainer.model_accepts_loss_kwargs = False
        with gradcheck_suite.audit() as audit:
            trainer.train()
        assert audit.result.verdict == verdict, audit.result
        assert (verdict == "holds") == (audit.result.violation is None)
    for part in ("2/4: divided by 4, where the window has 2", "transformers#39659"):
        assert part in audit.result.violation.explanation


# An audit leaves nothing behind, keeps no graph alive, and breaks no other tool of torch.


def test_what_was_replaced_is_put_back():
    before = torch.autograd.Variable._execution_engine
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_suite.audit():
        assert torch.autograd.Variable._execution_engine is not before
        F.cross_entropy(model(torch.ones(1, 2)), torch.tensor([0])).backward()
        optimizer.step()
    assert torch.autograd.Variable._execution_engine is before
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize(("k", "diagnoses"), [(1, {"stale-window"}), (3, {"mean-of-means"})])
def test_a_trainer_that_switches_anomaly_mode_off_hides_no_line(k, diagnoses):
    """Lightning does so around a fit."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(count):
        return F.cross_entropy(model(torch.randn(count, 3)), torch.zeros(count, dtype=torch.long))

    def train(number):
        (loss(2 + number % 3) / k).backward()

    with gradcheck_suite.audit() as audit, torch.autograd.set_detect_anomaly(False):
        for _ in range(2):
            optimizer.zero_grad()
            for number in range(3 * k):
                train(number)
                if number % k == k - 1:
                    optimizer.step()
                    if k > 1:
                        optimizer.zero_grad()
            if k > 1:
                train(0)  # the same line by another path
    assert not torch.is_anomaly_enabled()
    faults = audit.result.violations
    line = loss.__code__.co_firstlineno + 1
    assert {violation.diagnosis for violation in faults} == diagnoses
    assert {(violation.loss or violation.where).rpartition("/")[2] for violation in faults} == {
        f"test_recorder.py:{line}"
    }


@pytest.mark.parametrize("on", [False, True])
def test_anomaly_mode_is_left_as_the_program_sets_it(on):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_suite.audit():
        switched = torch.autograd.set_detect_anomaly(on)
        for _ in range(2):
            model(torch.ones(1, 2)).square().mean().backward()
            optimizer.step()
        assert (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == (on, True)
        switched.__exit__(None, None, None)
    assert not torch.is_anomaly_enabled()


def test_a_loss_that_never_goes_backward_is_freed_with_its_graph():
    model = torch.nn.Linear(2, 2)
    with gradcheck_suite.audit():
        hidden = model(torch.ones(1, 2))
        freed = weakref.ref(hidden)
        loss = F.cross_entropy(hidden, torch.tensor([0]))
        del hidden, loss
        gc.collect()
        assert freed() is None


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripting_compiling_saving_and_copying_work_under_an_audit():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.ones(3, 2), torch.tensor([0, 1, 1])
    with gradcheck_suite.audit() as audit:
        compiled = torch.compile(
            lambda x, y: F.cross_entropy(model(x), y), backend="aot_eager", fullgraph=True
        )
        scripted = torch.jit.script(torch.nn.CrossEntropyLoss())
        # each forward after the step before it, else the second loss is that of old parameters
        for compute in (compiled, lambda x, y: scripted(model(x), y)):
            compute(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        file = io.BytesIO()
        torch.save(model, file)
        twin = copy.deepcopy(model)
        assert not any(p._backward_hooks for p in twin.parameters())
    assert audit.result.holds


def test_what_a_pass_computes_itself_keeps_no_stacks_and_the_line_of_the_loss_is_known():
    """An adjoint calls small modules: with a stack for each node they would take ten times as long."""
    inside = []

    class Adjoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            inside.append(torch.is_anomaly_enabled())
            return gradient * 2

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_suite.audit(quiet=True) as audit:
        for _ in range(3):
            for n in (4, 2):
                loss = Adjoint.apply(model(torch.randn(n, 3))).square().mean()
                loss = loss / 2
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert inside == [False] * 6
    violation = audit.result.violation
    for place, text in ((violation.loss, "square().mean()"), (violation.where, "loss / 2")):
        source, number = place.rsplit(":", 1)
        assert text in linecache.getline(source, int(number))
    assert violation.change == "division"
