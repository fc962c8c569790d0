"""What each loss function of torch divides by: its mean times that is its sum."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

import gradcheck_suite
from gradcheck_suite.auditing.losses import LOSSES, counted


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
