"""What reads gradients around a step, where some or all are None: scaling, clipping, closures, a
compiled step.

These are rules of torch, not of the suite. If one fails on a new version of torch, find out what
changed.
"""

from __future__ import annotations

import pytest
import torch

from studies.compiled_steps import forget


def _parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]


def _scaler() -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    # as for a loss; a scaler that has scaled nothing asks for this first
    scaler.scale(torch.ones(()))
    return scaler


# --- gradient scaling


def test_a_scaler_refuses_a_step_where_all_gradients_are_none():
    optimizer, scaler = torch.optim.SGD(_parameters(), lr=0.5), _scaler()
    scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()


def test_a_scaler_that_has_scaled_nothing_refuses_before_it_looks_at_gradients():
    optimizer = torch.optim.SGD(_parameters(), lr=0.5)
    with pytest.raises(AssertionError, match="Attempted step but _scale is None"):
        torch.amp.GradScaler("cpu").step(optimizer)


@pytest.mark.parametrize("zeros", [True, False])
def test_a_scaler_steps_where_some_gradients_are_none(zeros):
    (p, q), scaler = _parameters(), _scaler()
    optimizer = torch.optim.SGD([p, q], lr=0.5, weight_decay=0.5)
    q.grad = torch.zeros(2) if zeros else None
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == [1 - 0.5 * (1 + 0.5)] * 2  # the gradient 4 of the scaled loss, over 4
    assert q.tolist() == ([1 - 0.5 * 0.5] * 2 if zeros else [1, 1])


def test_a_scaler_steps_where_all_gradients_are_zeros():
    p, q = _parameters()
    optimizer, scaler = torch.optim.SGD([p, q], lr=0.5, weight_decay=0.5), _scaler()
    p.grad, q.grad = torch.zeros(2), torch.zeros(2)
    scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == [0.75, 0.75]


def test_a_scaler_refuses_a_closure_by_its_keyword_alone():
    # a positional closure runs after the gradients have been unscaled, and the step uses the scaled
    # ones; no upstream issue is known
    p = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([p], lr=0.125), _scaler()

    def closure():
        optimizer.zero_grad()
        loss = scaler.scale(p.sum())
        loss.backward()
        return loss

    closure()
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=closure)
    scaler.step(optimizer, closure)
    assert p.item() == 1 - 0.125 * 4


# --- clipping


def test_the_norm_of_no_gradient_is_zero():
    assert torch.nn.utils.clip_grad_norm_(_parameters(), 1.0, error_if_nonfinite=True).item() == 0


def test_clipping_by_norm_takes_none_for_zeros():
    found = []
    for other in (None, torch.zeros(2)):
        p, q = _parameters()
        p.grad, q.grad = torch.tensor([3.0, 4.0]), other
        found.append((torch.nn.utils.clip_grad_norm_([p, q], 1.0).item(), p.grad.tolist()))
        assert q.grad is other
    assert found[0] == found[1]
    assert found[0][0] == 5


def test_clipping_by_value_refuses_no_gradient_at_all():
    # clip_grad_norm_ returns 0 there; no upstream issue is known
    with pytest.raises(RuntimeError, match="empty"):
        torch.nn.utils.clip_grad_value_(_parameters(), 1.0)


# --- closures of L-BFGS


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_closures_see_the_same_under_none_and_zeros(line_search):
    # its first parameter is reached by all closures, the other by every second one
    paths = []
    for set_to_none in (True, False):
        p, q = _parameters()
        optimizer, calls, path = (
            torch.optim.LBFGS([p, q], lr=0.5, max_iter=3, line_search_fn=line_search),
            [0],
            [],
        )

        def closure(p=p, q=q, optimizer=optimizer, calls=calls, set_to_none=set_to_none):
            optimizer.zero_grad(set_to_none=set_to_none)
            calls[0] += 1
            loss = (p**4).sum() + ((q - 2).square().sum() if calls[0] % 2 else 0)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
            path.append((p.tolist(), q.tolist(), calls[0]))
        paths.append(path)
    assert paths[0] == paths[1]


# --- a compiled step


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # torch.compile warns about its own internals
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_compiled_step_does_as_the_plain_one_where_the_set_of_none_changes(
    optimizer, set_to_none
):
    patterns = [(1, 1), (1, 0), (0, 1), (1, 0), (1, 1)]
    # a compiled Adam corrects its averages in float32, which loses few digits with these betas; see
    # studies/tests/costs for the number of graphs
    own = {"momentum": 0.5} if optimizer is torch.optim.SGD else {"betas": (0.5, 0.75)}
    paths = []
    for compiled in (False, True):
        forget()
        parameters = _parameters()
        made = optimizer(parameters, lr=0.25, weight_decay=0.5, **own)
        step, path = torch.compile(made.step, backend="eager") if compiled else made.step, []
        for pattern in patterns:
            for p, reached in zip(parameters, pattern, strict=True):
                if reached:
                    (2 * p).sum().backward()
            step()
            path.append([p.tolist() for p in parameters])
            made.zero_grad(set_to_none=set_to_none)
        paths.append(path)
    forget()
    for one, other in zip(*paths, strict=True):
        # values of order 1, five steps of eight float32 operations, 2^-24 each
        assert one == [pytest.approx(values, abs=5 * 8 * 2**-24) for values in other]
