"""What a loss divides by is read off its graph: its mean times that is its sum, for losses of torch
and by hand.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

import gradcheck_suite
from gradcheck_suite.auditing.loss_terms import Term
from gradcheck_suite.auditing.terms import Reader, read_numbers
from gradcheck_suite.auditing.weights import LossInWindow, compare_terms


def _normal(*shape):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )


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


def _terms(loss):
    reader = Reader()
    reader.read([loss])
    loss.backward()
    reader.close()
    assert reader.error is None
    found = reader.measured()
    read_numbers(found)
    return [one.term for one in found]


def _leaf(args):
    """Return the arguments of a loss, the first of which requires a gradient, as the output of a
    model would.
    """
    return (args[0].detach().requires_grad_() * 1.0, *args[1:])


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("index", range(len(CALLS)), ids=[name for name, _, _ in CALLS])
def test_the_mean_times_what_its_terms_count_is_the_sum(index):
    """Both are the same terms, so the ratio of their weights is what the mean divides by."""
    name, args, kwargs = CALLS[index]
    mean, total = (getattr(F, name)(*_leaf(args), **kwargs, reduction=r) for r in ("mean", "sum"))
    of_mean, of_sum = _terms(mean), _terms(total)
    assert of_mean
    assert not any(term.opaque for term in of_mean)
    divisors = [b.weight / a.weight for a, b in zip(of_mean, of_sum, strict=True)]
    for divisor in divisors:
        torch.testing.assert_close(mean * divisor, total, check_dtype=False)
    assert any(count == pytest.approx(divisors[0]) for count in of_mean[0].counts.values())


def test_means_of_their_own():
    log = X.log_softmax(1)
    (term,) = _terms(F.kl_div(log.requires_grad_() * 1.0, Y.softmax(1), reduction="batchmean"))
    assert term.weight == pytest.approx(1 / 6)
    logits = _normal(9, 2, 5).log_softmax(2).requires_grad_() * 1.0
    loss = F.ctc_loss(
        logits, torch.ones(2, 3, dtype=torch.long), torch.tensor([9, 9]), torch.tensor([3, 2])
    )
    (term,) = _terms(loss)
    # the mean over two sequences of what each weighs by one over its length
    assert (term.weight, term.counts["nonzero"]) == (pytest.approx(1 / 2), 2)


UNEQUAL, EQUAL = (4, 2, 7, 1), (4, 4, 4, 4)
LOOPS = {
    "sound": (UNEQUAL, "n / total", None),
    "mean of means": (UNEQUAL, "1 / 4", "mean-of-means"),
    "undivided": (EQUAL, "1.0", "wrong-scale"),
}
"""Sizes of the micro-batches, the factor of each one's mean, the diagnosis."""
HAND_WRITTEN = {
    "masked mean": "((out - y) ** 2 * m).sum() / m.sum()",
    "masked select": "((out - y) ** 2)[m > 0].mean()",
    "log-probabilities": "-out.log_softmax(1).gather(1, y.long()[:, :1].clamp(0, 2)).mean()",
    "policy gradient": "-(out.log_softmax(1)[:, 0] * y[:, 0]).mean()",
    "preference": "-F.logsigmoid(out[:, 0] - out[:, 1]).mean()",
    "diffusion": "F.mse_loss(out, y, reduction='none').flatten(1).mean(1).mean()",
    "einsum": "torch.einsum('ij,ij->', out - y, out - y) / out.numel()",
    "soft targets": "(-y.softmax(1) * out.log_softmax(1)).sum(1).mean()",
    "view in place": "(lambda e: (e.__setitem__((m == 0), 0.0), e.sum() / m.sum())[1])((out - y) ** 2)",
    "losses added to zeros": "torch.zeros(1) + F.mse_loss(out, y)",
    "two heads": "(F.mse_loss(out[:, 0], y[:, 0]) + F.mse_loss(out[:, 1], y[:, 1])) / 2",
    "triplet": "F.triplet_margin_loss(out, y, -y)",
    "negative": "-(out * y).mean()",
    "norm of each": "((out - y) ** 2).sum(1).sqrt().mean()",
    "chunks": "chunked(out, y.argmax(1).where(m[:, 0] > 0, -100)) / m[:, 0].sum()",
}
"""A loss of the outputs, targets and a mask, each a mean over what `COUNT` counts."""
OF_DATA = ("policy gradient", "negative")
"""Losses that data multiply: whether a division is in these cannot be told."""
COUNT = {
    "masked mean": "m.sum()",
    "masked select": "m.sum()",
    "view in place": "m.sum()",
    "chunks": "m[:, 0].sum()",
}


def _chunked(out, labels):
    """Return the sum of a cross entropy that is computed in chunks, some of whose targets are
    ignored.
    """
    pairs = zip(out.split(3), labels.split(3), strict=True)
    return torch.cat([F.cross_entropy(a, b, reduction="none") for a, b in pairs]).sum()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("loss", HAND_WRITTEN)
def test_losses_that_are_written_by_hand_are_read(loss, loop):
    sizes, weight, diagnosis = LOOPS[loop]
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_suite.audit(every=100) as audit:
        for _ in range(2):
            batches = [
                (torch.randn(n, 5), torch.randn(n, 3), (torch.rand(n, 3) > 0.4).float())
                for n in sizes
            ]
            for _, _, m in batches:
                m[0] = 1.0
                m[sizes == EQUAL] = 1.0
            counts = [
                float(eval(COUNT.get(loss, "len(y)"), {"y": y, "m": m})) for _, y, m in batches
            ]
            for (x, y, m), n in zip(batches, counts, strict=True):
                value = eval(
                    HAND_WRITTEN[loss],
                    {"out": model(x), "y": y, "m": m, "torch": torch, "F": F, "chunked": _chunked},
                )
                (value * eval(weight, {"n": n, "total": sum(counts)})).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = audit.result
    is_finding = loss in OF_DATA and loop == "undivided"
    assert [v.diagnosis for v in found.violations] == (
        [diagnosis] if diagnosis and not is_finding else []
    ), found
    assert (
        any("else it is 4: the sum of 4 means, never" in text for text in found.findings)
        == is_finding
    ), found
    assert found.windows == 2, found


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("losses / k * w", ""),
        ("losses * w / k", ""),
        ("torch.tensor(1 / k) * losses * w", ""),
        (
            "losses * (w / k)",
            "if the weights of the samples have its inverse, nothing is to be done; else it is 4",
        ),
        (
            "losses * w / 4",
            "2/4 of what it should: divided by 4, where the window has 2 micro-batches",
        ),
        ("losses * (w / w.mean())", "4 times what it should: the sum of 4 means, never divided"),
        ("losses * w / w.mean()", "4 times what it should: the sum of 4 means, never divided"),
    ],
)
def test_a_number_among_weights_of_samples_is_the_losss_and_one_in_them_is_not_known(loss, said):
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_suite.audit(without=("batch",)) as audit:
        for k in (4, 4, 2):
            for _ in range(k):
                losses = F.cross_entropy(
                    model(torch.randn(3, 5)), torch.randint(0, 3, (3,)), reduction="none"
                )
                eval(
                    loss, {"losses": losses, "w": torch.rand(3), "k": k, "torch": torch}
                ).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = audit.result
    if not said or said.startswith("if"):
        assert found.holds, found
        assert any(said in text for text in found.findings) == bool(said), found
    else:
        assert found.violation.diagnosis == "wrong-scale"
        assert said in found.violation.explanation


# A loss compiled by Inductor: its weights are hidden and reported so, its sums are judged, and a
# declaration helps.


SIZES = UNEQUAL


def _trained(*, counted, declared=False, reset=True):
    """Return the audit's result on two windows of a loss that Inductor compiles."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(
        lambda x, y: F.cross_entropy(model(x), y), backend="inductor", dynamic=True
    )
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


@pytest.mark.parametrize("weights", [(math.inf, 0.25, 0.5), (math.inf, math.inf, math.inf)])
def test_infinite_weights_have_no_name_and_give_no_warning(weights):
    found = compare_terms(
        [
            LossInWindow((0, index), Term(("Mean",), weight, {"elements": count}, mean=True), 1.0)
            for index, (weight, count) in enumerate(zip(weights, (2.0, 4.0, 2.0), strict=True))
        ]
    )
    assert (found.status, found.named) == ("unequal", None)
