"""Small cases in which every number was worked out by hand.

Linear(2, 3) in float32 on 4 items: the input is 32 bytes, the weight 24, the bias 12, the output
48, the loss 4. The gradients G are 36 bytes in 2 tensors.
"""

from __future__ import annotations

import pytest
import torch

from studies.ledger import ACTIVATIONS, GRADIENTS, OTHER, PARAMETERS, STATE, TEMPORARIES, Ledger
from studies.reset_laws import MemoryTraffic

WEIGHT, BIAS, INPUT, OUTPUT, SCALAR = 24, 12, 32, 48, 4
G = WEIGHT + BIAS


def _linear():
    return torch.nn.Linear(2, 3), torch.ones(4, 2)


def _window(ledger, model, optimizer, x, reset):
    for _ in range(2):
        with ledger.phase("forward"):
            loss = model(x).sum()
        loss.backward()
        del loss
    optimizer.step()
    reset()


@pytest.fixture
def zeroed():
    """A ledger over two windows of K = 2, with plain SGD and zero_."""
    model, x = _linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ledger = Ledger(model, optimizer)
    with ledger:
        for _ in range(2):
            _window(ledger, model, optimizer, x, lambda: optimizer.zero_grad(set_to_none=False))
    return ledger


def test_the_forward(zeroed):
    # addmm reads bias, input and weight and writes the output, sum reads that; the transposed
    # weight is a view
    once = MemoryTraffic(
        operations=2, views=1, read=BIAS + INPUT + WEIGHT + OUTPUT, written=OUTPUT + SCALAR
    )
    seen = zeroed.total("forward", window=0)
    assert (seen.operations, seen.views, seen.read, seen.written) == (
        4,
        2,
        2 * once.read,
        2 * once.written,
    )
    # of the two storages that each forward makes, the output is free before the forward is over
    assert (seen.allocated, seen.freed) == (2 * (OUTPUT + SCALAR), 2 * OUTPUT)
    assert zeroed.operations("forward") == {"addmm": 4, "sum": 4}


def test_the_backward(zeroed):
    # the loss's gradient is expanded to the output's shape: the product with the input and the sum
    # over items read it
    seen = zeroed.total("backward", window=0)
    assert zeroed.operations("backward", window=0) == {"mm": 2, "sum": 2}
    assert seen.read == 2 * ((OUTPUT + INPUT) + OUTPUT)
    assert (seen.written, seen.allocated) == (2 * G, 2 * G)


def test_the_accumulation(zeroed):
    # the first window's first gradients are taken, which is a view; what follows is added
    first, second = (zeroed.total("accumulate", window=w) for w in (0, 1))
    assert (first.operations, first.views, first.read, first.written) == (2, 2, 2 * G, G)
    assert (second.operations, second.views, second.read, second.written) == (4, 0, 4 * G, 2 * G)
    assert first.allocated == second.allocated == 0
    # what was added is free at once
    assert (first.freed, second.freed) == (G, 2 * G)


def test_the_reset(zeroed):
    assert zeroed.total("reset", window=0) == MemoryTraffic()
    assert zeroed.total("reset", window=1) == MemoryTraffic(operations=2, written=G)
    assert zeroed.total("reset", window=2) == MemoryTraffic(operations=2, written=G)


def test_the_step(zeroed):
    # p += -lr * g, once per parameter and window
    assert zeroed.total("step", window=1) == MemoryTraffic(operations=2, read=2 * G, written=G)


def test_everything_else(zeroed):
    # the gradient of the loss is made before autograd runs
    assert zeroed.operations("other") == {"ones_like": 4}
    assert zeroed.total("handling") == MemoryTraffic()


def test_what_is_alive(zeroed):
    assert [start[GRADIENTS] for start in zeroed.starts] == [0, G]
    nothing_else = dict.fromkeys((STATE, ACTIVATIONS, TEMPORARIES, OTHER), 0)
    assert zeroed.live == {PARAMETERS: G, GRADIENTS: G, **nothing_else}


def test_the_peaks(zeroed):
    # output and loss are alive at the end of a forward; gradients as well, once there are any
    assert zeroed.peak("forward", window=0).bytes == G + G + OUTPUT + SCALAR
    assert zeroed.peak("forward", window=0).by_category[ACTIVATIONS] == OUTPUT + SCALAR
    # the loss, its gradient, and one after the other the weight's and the bias's new gradients
    # beside the sums
    backward = zeroed.peak("backward", "accumulate", window=1)
    assert backward.bytes in (G + G + 2 * SCALAR + WEIGHT, G + G + 2 * SCALAR + G)
    assert zeroed.peak().bytes == zeroed.peak("forward").bytes
    assert zeroed.peak("step").by_category[GRADIENTS] == G


def test_a_release():
    model, x = _linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ledger = Ledger(model, optimizer)
    with ledger:
        for _ in range(2):
            _window(ledger, model, optimizer, x, optimizer.zero_grad)
    for window in (1, 2):
        assert ledger.total("reset", window=window) == MemoryTraffic(freed=G)
    for window in (0, 1):
        seen = ledger.total("accumulate", window=window)
        assert (seen.operations, seen.views, seen.read, seen.written) == (2, 2, 2 * G, G)
    assert [start[GRADIENTS] for start in ledger.starts] == [0, 0]
    assert ledger.live[GRADIENTS] == 0


def test_state_is_told_from_temporaries():
    model, x = _linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Ledger(model, optimizer) as ledger:
        _window(ledger, model, optimizer, x, optimizer.zero_grad)
    assert ledger.live[STATE] == G
    assert ledger.total("step").allocated == G
    # state that is there from the start counts from the start
    with Ledger(model, optimizer) as later:
        _window(later, model, optimizer, x, optimizer.zero_grad)
    assert later.starts[0][STATE] == G
    assert later.total("step").allocated == 0


# --- single operations, on vectors of 5 float64: 40 bytes

V = 40


def _recorded(operation):
    with Ledger() as ledger:
        operation()
    return ledger


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda a, b: a + b, MemoryTraffic(1, 0, 2 * V, V, V, V)),
        (lambda a, b: a * a, MemoryTraffic(1, 0, V, V, V, V)),
        (lambda a, b: a.add_(b), MemoryTraffic(1, 0, 2 * V, V)),
        (lambda a, b: a.mul_(2), MemoryTraffic(1, 0, V, V)),
        (lambda a, b: a.zero_(), MemoryTraffic(1, 0, 0, V)),
        (lambda a, b: a.fill_(3), MemoryTraffic(1, 0, 0, V)),
        (lambda a, b: a.copy_(b), MemoryTraffic(1, 0, V, V)),
        (lambda a, b: a.uniform_(), MemoryTraffic(1, 0, 0, V)),
        (lambda a, b: torch.add(a, a, out=b), MemoryTraffic(1, 0, V, V)),
        (lambda a, b: torch.zeros_like(a), MemoryTraffic(1, 0, 0, V, V, V)),
        (lambda a, b: torch.empty_like(a), MemoryTraffic(1, 0, 0, 0, V, V)),
        (lambda a, b: a.new_ones(2), MemoryTraffic(1, 0, 0, 16, 16, 16)),
        (lambda a, b: a.sum(), MemoryTraffic(1, 0, V, 8, 8, 8)),
        (lambda a, b: a.view(5, 1).t()[0], MemoryTraffic(0, 3)),
        (lambda a, b: a.unsqueeze_(0), MemoryTraffic(0, 1)),
        (lambda a, b: a[1:3].zero_(), MemoryTraffic(1, 1, 0, 16)),
        (lambda a, b: a.expand(3, 5).sum(), MemoryTraffic(1, 1, 3 * V, 8, 8, 8)),
        (lambda a, b: torch._foreach_zero_([a, b]), MemoryTraffic(1, 0, 0, 2 * V)),
        (lambda a, b: torch._foreach_add_([a, b], [b, a]), MemoryTraffic(1, 0, 2 * V, 2 * V)),
        (
            lambda a, b: torch._foreach_mul([a, b], 2.0),
            MemoryTraffic(1, 0, 2 * V, 2 * V, 2 * V, 2 * V),
        ),
        (lambda a, b: torch.stack([a, b]), MemoryTraffic(1, 0, 2 * V, 2 * V, 2 * V, 2 * V)),
        (lambda a, b: a[0].item(), MemoryTraffic(1, 1, 8, 0)),
        (lambda a, b: torch.tensor(2.0), MemoryTraffic(0, 1, 0, 0, 4, 4)),
        (
            lambda a, b: torch.where(a > 0, a, b),
            MemoryTraffic(2, 0, V + (5 + 2 * V), 5 + V, 5 + V, 5 + V),
        ),
    ],
)
def test_one_operation(operation, expected):
    a, b = torch.arange(5.0, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    assert _recorded(lambda: operation(a, b)).total() == expected


def test_a_storage_counts_once_and_until_its_last_view_goes():
    with Ledger() as ledger:
        a = torch.zeros(5, dtype=torch.float64)
        views = [a[i:] for i in range(5)]
        assert ledger.live[OTHER] == V
        del a
        assert ledger.live[OTHER] == V
        del views[1:]
        assert ledger.live[OTHER] == V
        views.clear()
        assert ledger.live[OTHER] == 0
    assert (ledger.total().allocated, ledger.total().freed) == (V, V)


def test_a_storage_that_grows_is_measured_again():
    with Ledger() as ledger:
        a = torch.zeros(5, dtype=torch.float64)
        a.resize_(10)
        assert ledger.live[OTHER] == 2 * V
        a.untyped_storage().resize_(8)
        a.resize_(1)
        assert ledger.live[OTHER] == 8
        assert (ledger.total().allocated, ledger.total().freed) == (2 * V, 2 * V - 8)


def test_a_gradient_that_cannot_be_taken_is_cloned():
    # the gradient of a sum is one number expanded, which is no memory of its own to add to
    p = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    model = torch.nn.ParameterList([p])
    with Ledger(model) as ledger:
        p.sum().backward()
    assert ledger.operations("accumulate") == {"new_empty_strided": 1, "copy_": 1}
    seen = ledger.total("accumulate")
    assert (seen.read, seen.written, seen.allocated) == (V, V, V)
    assert ledger.live[GRADIENTS] == V


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_gradient_with_a_graph_is_added_out_of_place():
    p = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    model = torch.nn.ParameterList([p])
    with Ledger(model) as ledger:
        (p**3).sum().backward(create_graph=True)
        (p**3).sum().backward(create_graph=True)
    assert ledger.operations("accumulate") == {"new_empty_strided": 1, "copy_": 1, "add": 1}
    p.grad = None


def test_what_the_loop_does_to_gradients_is_told_apart():
    model, x = _linear()
    with Ledger(model) as ledger:
        model(x).sum().backward()
        for p in model.parameters():
            p.grad.div_(2)
    assert ledger.operations("handling") == {"div_": 2}
    assert ledger.total("handling") == MemoryTraffic(2, 0, G, G)


def test_a_named_phase_holds_but_for_a_backward_inside_it():
    model, x = _linear()
    with Ledger(model) as ledger, ledger.phase("step"):
        with torch.no_grad():
            x * 2
        model(x).sum().backward()
    assert ledger.operations("step") == {"mul": 1, "addmm": 1, "sum": 1, "ones_like": 1}
    assert set(ledger.operations("backward")) == {"mm", "sum"}


def test_a_step_inside_a_backward_is_a_step():
    model, x = _linear()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in optimizers:
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with Ledger(model) as ledger:
        model(x).sum().backward()
    assert ledger.operations("step") == {"add_": 2}
    assert ledger.window == 0
