"""Claims of the blog post (C1.1 to C1.6 and C1.9): memory and traffic, counted exactly."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.claims import sizes
from gradcheck_suite.evidence.claims.claim import Claim, Finding
from gradcheck_suite.evidence.claims.training_under_ledger import DEPTH, train

_SMALL = {"width": 32, "items": 8, "micro_batches": 1}


def _kept() -> Finding:
    (zeroed, size), (released, _) = train("zero_", **_SMALL), train("set_to_none", **_SMALL)
    alive = {name: ledger.starts[1]["gradients"] for name, ledger in (("zero_", zeroed), ("None", released))}
    freed = {name: ledger.total("reset", window=1).freed for name, ledger in (("zero_", zeroed), ("None", released))}
    assert alive == {"zero_": size, "None": 0}
    assert freed == {"zero_": 0, "None": size}
    return Finding(
        "confirmed",
        "zero_ frees nothing: all gradients are still allocated when the next forward begins.",
        figures={
            "bytes of all gradients": size,
            "alive when the next forward begins, zero_ / None": f"{alive['zero_']} / {alive['None']}",
            "freed by the reset, zero_ / None": f"{freed['zero_']} / {freed['None']}",
        },
    )


def _additions(micro_batches: int) -> tuple[int, int]:
    arguments = {**_SMALL, "micro_batches": micro_batches}
    found = [train(mode, **arguments)[0].operations("accumulate", window=1) for mode in ("zero_", "set_to_none")]
    return found[0].get("add_", 0), found[1].get("add_", 0)


def _redundant() -> Finding:
    figures = {}
    for k in (1, 4):
        zeroed, released = _additions(k)
        assert (zeroed, released) == (DEPTH * k, DEPTH * (k - 1))
        figures[f"additions per step, {DEPTH} parameters, K = {k}: zero_ / None"] = f"{zeroed} / {released}"
    return Finding(
        "confirmed",
        "After zero_, autograd adds each parameter's first gradient of a window to zeros: one addition per parameter "
        "and step that a release avoids, with or without accumulation.",
        figures=figures,
    )


def _assigned() -> Finding:
    w = torch.nn.Parameter(torch.ones(3))
    seen: list[int] = []
    handle = w.register_hook(lambda g: seen.append(g.data_ptr()))
    (w * torch.arange(3.0)).sum().backward()
    assert w.grad is not None
    taken = w.grad.data_ptr() == seen[0]
    first = w.grad.data_ptr()
    (w * torch.arange(3.0)).sum().backward()
    added = w.grad.data_ptr() == first
    handle.remove()
    transposed = torch.nn.Parameter(torch.ones(2, 3))
    (transposed.T * torch.ones(3, 2)).sum().backward()
    assert taken
    assert added
    return Finding(
        "conditional",
        "The first gradient after a release is not added to anything: autograd takes the tensor that backward made, "
        "without a copy. It adds the second micro-batch's gradient in place.",
        condition="for the first backward after the release; autograd copies a dense gradient that something else "
        "refers to, or whose strides are not those that it wants for `.grad`",
        figures={
            "first: .grad is the tensor that backward made": taken,
            "second: added in place to the first": added,
            "additions per step, K = 4: zero_ / None": "{} / {}".format(*_additions(4)),
        },
        counterexample="the second backward of a window adds, under either mode",
    )


def _frees_for_others() -> Finding:
    figures: dict[str, object] = {}
    savings = {}
    for what, arguments in (
        ("many activations", {"width": 16, "items": 2048, "micro_batches": 1}),
        ("few activations", {"width": 256, "items": 4, "micro_batches": 1}),
    ):
        (zeroed, size), (released, _) = train("zero_", **arguments), train("set_to_none", **arguments)
        peaks = zeroed.peak(window=1), released.peak(window=1)
        savings[what] = (peaks[0].bytes - peaks[1].bytes) / size
        figures[f"{what}: peak under zero_ / None, bytes"] = f"{peaks[0].bytes:,} / {peaks[1].bytes:,}"
        figures[f"{what}: phase of the peak"] = f"{peaks[0].phase} / {peaks[1].phase}"
        figures[f"{what}: saved, in gradients' bytes"] = savings[what]
    assert savings["few activations"] < 0.5 < savings["many activations"]
    return Finding(
        "conditional",
        "Between steps the memory is free, and a forward whose activations make the peak can use it. Where the peak "
        "occurs late in the backward, all gradients are allocated again, and a release saves little or nothing.",
        condition="the peak occurs in the forward or early in the backward: activations outweigh gradients",
        figures=figures,
        counterexample="width 256, 4 items: the peak occurs at the end of the backward, and releasing saves less than "
        "half of the gradients' bytes",
    )


def _more_allocations() -> Finding:
    (zeroed, size), (released, _) = train("zero_", **_SMALL), train("set_to_none", **_SMALL)
    freed = [ledger.total("reset", "accumulate", window=1).freed for ledger in (zeroed, released)]
    peaks = [ledger.peak(window=1).bytes for ledger in (zeroed, released)]
    assert freed[0] == freed[1] == size
    assert peaks[1] <= peaks[0]
    return Finding(
        "conditional",
        "Each step frees all gradients once and allocates them again, where zeroing keeps them. But under zeroing "
        "each backward allocates a new gradient too, adds it and frees it, so allocations per step are the same. The "
        "peak is never higher under a release.",
        condition="only deallocations between steps count; backward allocates equally often in both modes",
        figures={
            "bytes of all gradients": size,
            "freed per step by reset and accumulation, zero_ / None": f"{freed[0]} / {freed[1]}",
            "peak, zero_ / None": f"{peaks[0]} / {peaks[1]}",
        },
        counterexample="under zero_ every backward still allocates each gradient, to add it and free it again",
    )


def _traffic() -> Finding:
    (zeroed, size), (released, _) = train("zero_", **_SMALL), train("set_to_none", **_SMALL)
    figures: dict[str, object] = {"bytes of all gradients (G)": size}
    moved = {}
    for name, ledger in (("zero_", zeroed), ("None", released)):
        reset, added = ledger.total("reset", window=1), ledger.total("accumulate", window=1)
        moved[name] = reset.read + reset.written + added.read + added.written
        figures[f"{name}: reset writes, accumulation reads, writes, in G"] = (
            f"{reset.written / size:g}, {added.read / size:g}, {added.written / size:g}"
        )
    assert moved == {"zero_": 4 * size, "None": 0}
    return Finding(
        "conditional",
        "Zeroing moves four times the gradients' bytes per step with K = 1: it writes the zeros, reads them and the "
        "new gradient, and writes the sum. The claim omits the write of the zeros. A release moves nothing beyond the "
        "store that makes the gradient, which both modes need. The bytes were counted; nothing was timed on a GPU.",
        condition="gradients are large; for small gradients the kernel launches cost more than the bytes",
        figures=figures,
        counterexample="load, load, add, store is 3 G; zero_ itself writes one more",
    )


def _sum_of_four() -> Finding:
    gradients = [torch.tensor([float(2**i), -float(3 * i)], dtype=torch.float64) for i in range(4)]
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    for gradient in gradients:
        (w * gradient / 4).sum().backward()
    assert w.grad is not None
    right = torch.stack(gradients).sum(dim=0) / 4
    assert torch.equal(w.grad, right)
    return Finding(
        "confirmed",
        "After four backwards the buffer holds the sum of the four gradients; with the loss divided by 4, as in the "
        "loop, that sum is their mean.",
        figures={
            "gradients of the losses divided by 4": [(g / 4).tolist() for g in gradients],
            "held: the sum of these": w.grad.tolist(),
        },
    )


CLAIMS = (
    Claim(
        "C1.1",
        "Zeroing keeps the gradient buffers allocated: it frees no significant memory.",
        "bytes of gradients alive when the next forward begins, counted by the ledger",
        _kept,
        short="Zeroing keeps gradient buffers allocated",
    ),
    Claim(
        "C1.2",
        "After zeroing, the next backward adds the new gradient to 0: a redundant operation, which every step does "
        "even without accumulation.",
        "additions of accumulation per step, counted by the ledger",
        _redundant,
        short="After zeroing, backward adds to 0 in vain",
    ),
    Claim(
        "C1.3",
        "After a release (set_to_none=True) backward assigns instead of adding.",
        "whether .grad is the tensor that backward made; additions per step",
        _assigned,
        short="After a release, backward assigns",
    ),
    Claim(
        "C1.4",
        "A release frees memory for other use between steps: larger batches or models fit.",
        "peaks under both modes, once with more activations than gradients and once with fewer",
        _frees_for_others,
        short="A release frees memory between steps",
    ),
    Claim(
        "C1.5",
        "A release allocates and deallocates more often, and is still the better use of memory overall.",
        "bytes freed per step, and the peak, under both modes",
        _more_allocations,
        short="A release reallocates, and is still better",
    ),
    Claim(
        "C1.6",
        "Operations: zero mode = load new gradient, load zero gradient, add, store; None mode = store. The transfers "
        "are the bottleneck on a GPU.",
        "bytes read and written by reset and accumulation per step, counted by the ledger",
        _traffic,
        short="zero_ moves more bytes than None",
    ),
    *sizes.CLAIMS,
    Claim(
        "C1.9",
        "By the end of 4 steps the buffer holds the sum of the 4 gradients.",
        "four backwards with numbers that float64 holds exactly",
        _sum_of_four,
        short="4 backwards add up 4 gradients",
    ),
)
