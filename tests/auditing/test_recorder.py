"""Windows are held to the accumulation steps of the trainer that runs, also where every epoch is shorter."""

from __future__ import annotations

import copy
import gc
import io
import types
import weakref

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

import gradcheck_suite
from gradcheck_suite.auditing.losses import LOSSES, counted
from gradcheck_suite.auditing.recorder import Patches, Recorder, configured_steps
from tests.auditing.running import trained


def _optimizer_named_as_accelerates(parameters, steps):
    """Return an optimizer whose `step` has a frame as that of Accelerate's `AcceleratedOptimizer`."""
    module = types.ModuleType("accelerate.optimizer")
    exec(
        "class Wrapper:\n"
        "    def __init__(self, optimizer, state):\n"
        "        self.optimizer, self.gradient_state = optimizer, state\n"
        "    def step(self):\n"
        "        self.optimizer.step()\n",
        module.__dict__,
    )
    return module.Wrapper(torch.optim.SGD(parameters, lr=0.1), types.SimpleNamespace(num_steps=steps))


@pytest.mark.parametrize(
    ("steps", "length", "divisor", "diagnosis"),
    [(4, 2, 4, "wrong-scale"), (4, 1, 4, "wrong-scale"), (4, 2, 2, None), (4, 4, 4, None), (1, 2, 4, None)],
)
def test_windows_that_are_all_short_are_held_to_the_steps_of_the_trainer(steps, length, divisor, diagnosis):
    """What no trainer states reads as a coefficient."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = _optimizer_named_as_accelerates(model.parameters(), steps)
    with gradcheck_suite.audit() as audit:
        for _ in range(3):
            for _ in range(length):
                loss = torch.nn.functional.mse_loss(model(torch.randn(4, 3)), torch.randn(4, 2)) / divisor
                loss.backward()
            optimizer.step()
            optimizer.optimizer.zero_grad()
    found = audit.result.violation
    assert (found and found.diagnosis) == diagnosis, audit.result
    if found is not None:
        assert f"{length}/{steps}" in found.explanation


def test_no_trainer_runs_here():
    assert configured_steps() is None


@pytest.mark.filterwarnings("default")
def test_transformers_trainer_is_held_to_its_steps_where_it_divides_by_them(tmp_path):
    """Releases before transformers#39659 divided by K also where an epoch is shorter; newer ones by its length."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")

    class Dividing(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
            return super().training_step(*args, **kwargs)

    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 20, (2, 5))]
    for kind, verdict in ((transformers.Trainer, "holds"), (Dividing, "violated")):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=1, **sizes))
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
    assert "2/4: divided by 4, where the window has 2" in audit.result.violation.explanation


# An audit leaves nothing behind, keeps no graph alive, and breaks no other tool of torch.


def _places():
    replaced = Patches(Recorder(lambda state, place: None))
    replaced.install()
    places = [(holder, name) for holder, name, _, _ in replaced._replaced]
    replaced.remove()
    return places


def test_what_was_replaced_is_put_back():
    places = _places()
    before = [holder.__dict__[name] for holder, name in places]
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_suite.audit():
        assert [holder.__dict__[name] for holder, name in places] != before
        kept = F.cross_entropy
        F.cross_entropy(model(torch.ones(1, 2)), torch.tensor([0])).backward()
        optimizer.step()
    assert all(holder.__dict__[name] is value for (holder, name), value in zip(places, before, strict=True))
    assert not any(p._backward_hooks for p in model.parameters())
    assert kept(torch.zeros(1, 2), torch.tensor([0])) > 0


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
        compiled = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend="aot_eager", fullgraph=True)
        for loss in (compiled(x, y), torch.jit.script(torch.nn.CrossEntropyLoss())(model(x), y)):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        file = io.BytesIO()
        torch.save(model, file)
        twin = copy.deepcopy(model)
        assert not any(p._backward_hooks for p in twin.parameters())
    assert "computed inside torch.compile" in audit.result.unjudged


SCRIPTED = """
import torch

def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

@torch.jit.script
class Doubled:
    def __init__(self):
        self.value = twice(torch.ones(1))
"""


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_class_that_is_scripted_under_an_audit_finds_the_functions_beside_it(tmp_path):
    """As `torch.distributed.optim` needs when it is imported."""
    script = tmp_path / "scripted.py"
    script.write_text(SCRIPTED)
    with gradcheck_suite.audit():
        assert trained(script)["Doubled"]().value == 2


# What each loss function of torch divides by: its mean times that is its sum.


def _normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


X, Y, Z = _normal(6, 5), _normal(6, 5) + 1, _normal(6, 5) - 1
CLASSES = torch.tensor([0, 4, 2, 2, -100, 1])
WEIGHT = torch.tensor([0.5, 2.0, 3.0, 1.0, 0.1], dtype=torch.float64)
SIGNS, ROW_SIGNS = torch.where(Y > 0, 1.0, -1.0), torch.tensor([1, -1, 1, 1, -1, 1])
CALLS = [
    ("cross_entropy", (X, CLASSES), {}),
    ("cross_entropy", (X, CLASSES), {"weight": WEIGHT, "label_smoothing": 0.1}),
    ("cross_entropy", (X, CLASSES.abs() % 5), {"ignore_index": 2, "weight": None}),
    ("cross_entropy", (_normal(6, 5, 3), torch.arange(18).reshape(6, 3) % 5), {"ignore_index": 4}),
    ("cross_entropy", (X, Y.softmax(1)), {"weight": WEIGHT}),
    ("cross_entropy", (X[0], CLASSES[0]), {}),
    ("nll_loss", (X.log_softmax(1), CLASSES), {"weight": WEIGHT}),
    ("mse_loss", (X, Y), {}),
    ("mse_loss", (X, Y), {"weight": Y.exp()}),
    ("l1_loss", (X, Y), {"weight": Y.exp()}),
    ("smooth_l1_loss", (X, Y), {}),
    ("huber_loss", (X, Y), {}),
    ("binary_cross_entropy", (X.sigmoid(), Y.sigmoid()), {"weight": WEIGHT}),
    ("binary_cross_entropy_with_logits", (X, Y.sigmoid()), {"pos_weight": WEIGHT}),
    ("kl_div", (X.log_softmax(1), Y.softmax(1)), {}),
    ("poisson_nll_loss", (X, Y.exp()), {}),
    ("gaussian_nll_loss", (X, Y, Z.exp()), {}),
    ("soft_margin_loss", (X, SIGNS), {}),
    ("hinge_embedding_loss", (X, SIGNS), {}),
    ("margin_ranking_loss", (X, Y, SIGNS), {}),
    ("cosine_embedding_loss", (X, Y, ROW_SIGNS), {}),
    ("triplet_margin_loss", (X, Y, Z), {}),
    ("triplet_margin_with_distance_loss", (X, Y, Z), {}),
    ("multi_margin_loss", (X, CLASSES.clamp(min=0)), {"weight": WEIGHT}),
    ("multilabel_margin_loss", (X, torch.tensor([[3, 0, -1, 1, 4]]).expand(6, 5)), {}),
    ("multilabel_soft_margin_loss", (X, (Y > 0).double()), {"weight": WEIGHT}),
]
if hasattr(F, "linear_cross_entropy"):
    CALLS.append(("linear_cross_entropy", (X, _normal(5, 5), CLASSES), {}))


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
def test_the_mean_times_the_divisor_is_the_sum():
    for name, args, kwargs in CALLS:
        mean = getattr(F, name)(*args, **kwargs)
        total = getattr(F, name)(*args, **kwargs, reduction="sum")
        found, _ = counted(name, args, kwargs)
        assert found.reduction == "mean"
        torch.testing.assert_close(mean * float(found.divisor), total, msg=lambda text, name=name: f"{name}: {text}")
        assert counted(name, args, {**kwargs, "reduction": "none"})[0].reduction == "none"


def test_reductions_of_their_own():
    assert counted("kl_div", (X, Y), {"reduction": "batchmean"})[0].divisor == 6
    assert counted("mse_loss", (X, Y), {"size_average": False})[0].reduction == "sum"
    arguments = (_normal(9, 2, 5), torch.ones(2, 3, dtype=torch.long), torch.tensor([9, 9]), torch.tensor([3, 2]))
    assert counted("ctc_loss", arguments, {})[0].divisor == 2


def test_every_loss_function_of_torch_is_recognised():
    public = {name for name in dir(F) if name.endswith("_loss") and not name.startswith("_")}
    public |= {name for name in dir(F) if "cross_entropy" in name or name == "kl_div"}
    assert public <= set(LOSSES)
    assert {name for name, _, _ in CALLS} | {"ctc_loss"} >= {name for name in LOSSES if hasattr(F, name)}


# A loss compiled by Inductor: its weights are hidden and reported so, its sums are judged, and a declaration helps.


SIZES = (4, 2, 7, 1)


def _trained(*, counted, declared=False, reset=True):
    """Return the audit's result on two windows of a loss that Inductor compiles."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend="inductor", dynamic=True)
    with gradcheck_suite.audit() as audit:
        for _ in range(2):
            for size in SIZES:
                loss = compiled(torch.randn(size, 5), torch.randint(0, 3, (size,)))
                if declared:
                    loss = gradcheck_suite.objective(loss, count=size)
                (loss * (size / sum(SIZES) if counted else 1 / len(SIZES))).backward()
            optimizer.step()
            if reset:
                optimizer.zero_grad()
    return audit.result


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_loss_that_inductor_compiles_hides_its_weights_alone():
    hidden = _trained(counted=False)
    assert (hidden.verdict, hidden.windows) == ("unjudged", 0), hidden
    assert "was computed inside torch.compile" in hidden.unjudged
    assert "gradcheck_suite.objective(loss, count=n)" in hidden.unjudged
    leaked = _trained(counted=True, reset=False).violation
    assert (leaked.diagnosis, leaked.step) == ("stale-window", 1)
    assert _trained(counted=False, declared=True).violation.diagnosis == "mean-of-means"
    assert _trained(counted=True, declared=True).holds
