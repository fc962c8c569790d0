"""The zoo's loops as their fix sentences ask: what to write in place of what.

A bug that has no row is a problem's own, or one whose remedy is a design and no edit, such as
another wrapper.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path

from studies.zoo.bug import Bug


@dataclass(frozen=True)
class Mend:
    """The mended form of a bug.

    Attributes:
        fix: a part of the fix sentence that the change follows.
        edits: (text of the loop, text in its place).
    """

    fix: str
    edits: tuple[tuple[str, str], ...]

    def write(self, bug: Bug, file: Path) -> None:
        """Write a file with the mended loop as `train`, and all that the bug's module has."""
        lines = inspect.getsource(inspect.unwrap(bug.loop)).splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("def "))
        decorators = [line for line in lines[:first] if line.startswith("@jax_training_loop")]
        text = "\n".join([*decorators, *lines[first:]])
        for old, new in self.edits:
            assert old in text, f"{bug.name} has no {old!r}"
            text = text.replace(old, new)
        name = inspect.unwrap(bug.loop).__name__
        file.write_text(
            "from studies.zoo.bug import train_soundly\n"
            f"import {bug.loop.__module__} as bugs\n"
            "globals().update({k: v for k, v in vars(bugs).items() if not k.startswith('__')})\n"
            f"{text}\ntrain = {name}\n"
        )


def _mend(fix: str, *edits: str) -> Mend:
    """Return a mend of alternating old and new texts."""
    return Mend(fix, tuple(zip(edits[::2], edits[1::2], strict=True)))


def _without(fix: str, text: str) -> Mend:
    """Return a mend that does nothing where something was done."""
    return _mend(fix, text, "pass")


OWN_SHARE = "run.count(batch) / window_count(run, window)"
STEP = "        run.optimizer.step()"
RESET = "        run.optimizer.zero_grad()"
OF_WINDOW = "in the whole window"
DIVIDE = "divide each summed loss by the window's count"
ONCE = "by the window's count, and by nothing else"
ADVANCE = "step after"
ONE_RESET = "reset once"
SWITCH_OFF = "switch"
IN_ORDER = "train the windows in the loader's order"
LOOK = "look for"
OF_RANKS = "all ranks"
MENDS: dict[str, Mend] = {
    # denominators
    "mean-of-means": _mend(OF_WINDOW, "1 / len(window)", OWN_SHARE),
    "no-divide": _mend(DIVIDE, "batch: 1)", f"batch: {OWN_SHARE})"),
    "double-divide": _mend(ONCE, "(loss / run.accumulation_steps).backward()", "loss.backward()"),
    "signature-sniff": _mend(DIVIDE, " and not takes_count", ""),
    "wrong-window-count": _mend("divide by the count of the", "first + k + 1]", "first + k]"),
    "rank-mean-of-means": _mend(
        OF_WINDOW,
        "in window_losses(run, mine)",
        "in [part_of_window(run, b, window_count(run, window)) for b in mine]",
        '(loss / len(ranks) if run.reduction == "mean" else loss)',
        "loss",
    ),
    "rank-over-correct": _mend("", " / RANKS", ""),
    "aux-loss-unscaled": _mend(
        "",
        "main * run.count(batch) / total + auxiliary",
        "(main + auxiliary) * run.count(batch) / total",
    ),
    "own-size-coefficient": _mend("weight each mean by its own count", " ** 2", ""),
    "skipped-items-counted": _mend("counts 0", ".clamp(1)", ""),
    "sentences-for-tokens": _mend(
        "by the window's count", 'len(batch["x"]) / sum(len(b["x"]) for b in window)', OWN_SHARE
    ),
    "tail-divided-by-steps": _mend(
        "by its own number",
        "_step_where(run, lambda i: (i + 1) % run.accumulation_steps == 0 or i + 1 == len(run.loader))",
        f"for window in windows(run):\n        backward_window(run, window)\n{STEP}\n{RESET}",
    ),
    # inputs
    "perturbed-parameters": _mend("perturbed", "alpha=0.05", "alpha=0.0"),
    "normalised-in-place": _without("a normalization in place", 'batch["x"].div_(2)'),
    "nan-loss-resets": _mend("", "run.loss(run.model, batch).isnan()", "False"),
    # missing and chosen micro-batches
    "autocast-cache": _mend("", "None if p.ndim > 1 else p.grad", "p.grad"),
    "missing-from-the-last": _mend(
        "set to None",
        "for p, gradient in gradients_of(run).items():",
        "for p, gradient in {**before, **gradients_of(run)}.items():",
        "p.grad = gradient + before.get(p, 0)",
        "p.grad = gradient if p.grad is None else p.grad + before.get(p, 0)",
    ),
    "last-k-times": _mend(
        "closures that read a loop's variable late", "lambda: part", "lambda batch=batch: part"
    ),
    "first-k-times": _mend("once per micro-batch", "[window[0]] * len(window)", "window"),
    "all-but-the-first": _mend("an iterator that is advanced twice", "window[1:]", "window"),
    "all-but-the-last": _mend("a `break`", "window[:-1]", "window"),
    "every-second": _mend("an iterator that is advanced twice", "window[::2]", "window"),
    "equal-sizes-dropped": _mend(
        LOOK, "list({_size(batch): batch for batch in window}.values())", "window"
    ),
    "single-items-skipped": _mend("by size", " if _size(batch) > 1", ""),
    "middle-twice": _mend("once per micro-batch", "[*window, window[1]]", "window"),
    # resets
    "no-reset": _mend(ONE_RESET, STEP, f"{STEP}\n{RESET}"),
    "reset-per-micro-batch": _mend(
        "not once per micro-batch", f"    {RESET}\n", "", STEP, f"{STEP}\n{RESET}"
    ),
    "cross-model-residue": _mend(
        "",
        "window[0]).backward()",
        "window[0]).backward(); run.optimizer.zero_grad()",
    ),
    "own-groups-only": _mend(
        ONE_RESET,
        "if first is not None:",
        "if True:",
        "first.zero_grad()",
        "run.optimizer.zero_grad()",
    ),
    "closure-without-reset": _mend(
        "", "for _ in range(3):\n", f"for _ in range(3):\n    {RESET}\n"
    ),
    "reset-by-multiplication": _mend("never by multiplying", "g.mul_(0)", "g.zero_()"),
    "none-breaks-readers": _mend(
        "", "in run.model.parameters()]", "in run.model.parameters() if p.grad is not None]"
    ),
    "faded-reset": _mend(ONE_RESET, "0.1", "0.0"),
    "leak-of-1e-8": _mend(ONE_RESET, "_leak(run, 1e-8)", "_leak(run, 0.0)"),
    "leak-of-1e-11": _mend(ONE_RESET, "_leak(run, 1e-11)", "_leak(run, 0.0)"),
    "reset-every-second-step": _mend(ONE_RESET, "if step % 2:", "if True:"),
    "biases-are-not-reset": _mend(ONE_RESET, "None if p.ndim > 1 else p.grad", "None"),
    "short-windows-are-not-reset": _mend(
        "that of the short last window", "if len(window) == run.accumulation_steps:", "if True:"
    ),
    # other windows
    "delayed-by-one": _mend(IN_ORDER, "_delay(run, {})", "train_soundly(run)"),
    "delayed-after-warm-up": _mend(
        "after they have been computed", "_delay(run, None)", "train_soundly(run)"
    ),
    "reversed-windows": _mend(IN_ORDER, "reversed(epoch_windows(run))", "epoch_windows(run)"),
    "swapped-pairs": _mend(IN_ORDER, "listed[i ^ 1] if i ^ 1 < len(listed) else own", "own"),
    "first-window-always": _mend(IN_ORDER, "first = first or window", "first = window"),
    "prefetched-micro-batch": _mend(
        "after the step of the window before it", "if following:", "if False:"
    ),
    "traces-of-the-next": _mend(IN_ORDER, "1e-7", "0.0"),
    "step-before-the-last": _mend(
        "after the last one of every epoch",
        "        fill_missing(run)",
        "        last.backward()",
        f"{RESET}\n        last.backward()",
        RESET,
    ),
    "previous-batch-variable": _mend("", "batch if before is None else before", "batch"),
    # window boundaries
    "tail-leak": _mend(ADVANCE, "if len(window) == run.accumulation_steps:", "if True:"),
    "tail-dropped": _mend(ADVANCE, "if len(window) < run.accumulation_steps:", "if False:"),
    "inverted-condition": _mend("where `(i + 1) % K == 0`", "!= 0", "== 0"),
    "off-by-one": _mend("where `(i + 1) % K == 0`", "i % run", "(i + 1) % run"),
    "resume-in-mid-window": _without("", "run.model.zero_grad()"),
    # steps
    "windows-of-one-more": _mend(
        "step after K micro-batches", "run.accumulation_steps + 1", "run.accumulation_steps"
    ),
    "windows-of-twice-the-size": _mend(
        "step after K micro-batches", "run.accumulation_steps * 2", "run.accumulation_steps"
    ),
    "two-steps-per-window": _mend("step once", f"{STEP}\n{STEP}", STEP),
    "first-window-skipped": _mend("a warm-up", "if i:", "if True:"),
    "last-window-skipped": _mend(
        "a range that ends early", "len(batches) - k, k", "len(batches), k"
    ),
    "step-at-the-end-of-an-epoch": _mend(
        "step once",
        "if len(window) == run.accumulation_steps:",
        "if True:",
        f"        {RESET}\n{STEP}",
        f"        {RESET}",
    ),
    "large-gradients-skipped": _mend(
        "switch off what skips them",
        "if not found or float(torch.stack(found).max()) <= 1.5:",
        "if True:",
    ),
    "scaler-overflows": _mend(
        "a smaller `init_scale`",
        "2.0**1020 * 2.0**3",
        "2.0**8",
        "mul_(2.0**-1020).mul_(2.0**-3)",
        "mul_(2.0**-8)",
    ),
    "clip-per-micro-batch": _mend("clip once", "if j < len(window):", "if False:"),
    "clip-before-unscale": _mend(
        "switch it off", "_dense(run), 100.0", "_dense(run), float('inf')"
    ),
    "decay-per-micro-batch": _mend("leave decay to the optimizer", "alpha=0.01", "alpha=0.0"),
    "optimizer-in-backward": _mend(
        "step once per window", f"    {STEP}\n    {RESET}", f"{STEP}\n{RESET}"
    ),
    "scheduler-per-micro-batch": _mend(
        "step once per window", "                scheduler.step()", "            scheduler.step()"
    ),
    "scaler-updated-per-micro-batch": _mend(
        "",
        "            scaler.unscale_(run.optimizer)\n",
        "",
        "            scaler.update()",
        "                scaler.update()",
    ),
    "unscale-per-micro-batch": _mend(
        "",
        "            for g in gradients_of(run).values():\n                g",
        "        for g in gradients_of(run).values():\n            g",
    ),
    "tensor-hook-clip": _mend("clip once", "g.clamp(-0.1, 0.1)", "g"),
    # accumulators
    "rescaled-accumulator": _mend(
        "scale each contribution",
        "for batch in window:\n            run.loss(run.model, batch).backward()",
        "for loss in window_losses(run, window):\n            loss.backward()",
        "g.div_(run.accumulation_steps)",
        "pass",
    ),
    "first-only": _mend("a flag", "if j == 0:", "if True:"),
    "last-only": _mend(
        "add to the gradient instead of setting it",
        "gradient: gradient)",
        "gradient: gradient if total is None else total + gradient)",
    ),
    "overwrites-in-mid-window": _mend("", "j == 1 or total is None", "total is None"),
    "doubling": _without("", "g.mul_(2)"),
    "ignores-add-mode": _mend("", " or j >= 4", ""),
    "hook-accumulates-the-sum": _mend(
        "not on the running sum",
        "collected[p] + gradient if p in collected else gradient.clone()",
        "gradient.clone()",
    ),
    "running-loss": _mend(
        "on its own loss and not on the running sum",
        "total.backward(retain_graph=True)",
        "loss.backward()",
    ),
    "low-precision-accumulator": _mend("in the parameter's dtype", ".bfloat16()", ""),
    # values
    "clip-norm-per-window": _without("switch it off", "_clip(gradients, 0.5)"),
    "clip-value-per-window": _without("switch it off", "g.clamp_(-0.05, 0.05)"),
    "clip-each-micro-batch": _without("clip once", "_clip(own, 0.2)"),
    "normalised-gradient": _without("do not divide", "g.div_(norm or 1.0)"),
    "signs-only": _without("or reduce it to signs", "g.sign_()"),
    "penalty-in-the-gradient": _mend("leave decay to the optimizer", "alpha=0.01", "alpha=0.0"),
    "noise-in-the-gradient": _mend("switch noise off", "1e-3", "0.0"),
    "small-elements-dropped": _without("a sparse communication", "g[g.abs() < 0.1] = 0"),
    "never-unscaled": _mend(
        "unscale the gradients once", "g.mul_(LOSS_SCALE)", "g.mul_(LOSS_SCALE).div_(LOSS_SCALE)"
    ),
    "unscaled-twice": _without("unscale the gradients once", "g.div_(LOSS_SCALE)"),
    "centred-gradient": _without("do so inside the optimizer", "g.sub_(g.mean())"),
    "flat-buffer-in-another-order": _mend(
        "match parameters by name", "in sorted(named)", "in named"
    ),
    "moving-average": _mend(
        "leave moving averages to the optimizer",
        "0.9 * average.get(p, torch.zeros_like(g)) + 0.1 * g",
        "g",
    ),
    # one parameter
    "last-parameter-doubled": _without("", "g.mul_(2)"),
    "last-parameter-reversed": _without("subtract where you add", "g.neg_()"),
    "last-parameter-zero": _without("do not reset between backward and step", "g.zero_()"),
    "last-parameter-stale": _mend("after they have been computed", "own | stale", "own"),
    "last-parameter-overwritten": _without("", "last.grad = None if others else last.grad"),
    "rows-permuted": _without("a gather", "g.copy_(g.roll(1, 0))"),
    "square-transposed": _without("a reshape", "g.copy_(g.T.clone())"),
    "first-row-only": _without("a shard", "g[1:].zero_()"),
    "one-element-doubled": _without("a shard", "g.view(-1)[-1].mul_(2)"),
    "heads-swapped": _mend(
        "match parameters by name",
        "= gradients[right], gradients[left]",
        "= gradients[left], gradients[right]",
    ),
    # ranks
    "mean-of-ranks-means": _mend(
        "over all ranks", "run, lambda own, total: own, reduce=_averaged", "run"
    ),
    "local-count": _mend("over all ranks", "total: own", "total: total"),
    "count-gathered-gradient-averaged": _mend(
        "multiply it by the number of ranks", "=_averaged", "=_averaged, factor=run.world_size"
    ),
    "multiplied-by-world-size": _mend(OF_RANKS, "factor=run.world_size", "factor=1.0"),
    "divided-by-world-size-twice": _mend(
        "multiply it by the number of ranks", "factor=1 / run", "factor=run"
    ),
    "world-size-hard-coded": _mend("the number of ranks", "factor=8", "factor=run.world_size"),
    "rank-0-count-broadcast": _mend(OF_RANKS, "_broadcast(own)", "total"),
    "rank-0-count-times-world-size": _mend(OF_RANKS, "_broadcast(own) * run.world_size", "total"),
    "sum-over-ranks-not-divided": _mend(DIVIDE, "total: 1.0", "total: total"),
    "gradient-all-reduced-twice": _mend(
        OF_RANKS,
        "        add_up_gradients(run)\n        add_up_gradients(run)",
        "        add_up_gradients(run)",
    ),
    "previous-window-count-of-ranks": _mend(
        OF_RANKS, "total if before is None else before", "total"
    ),
    "reset-on-rank-0-alone": _mend(ONE_RESET, "if run.rank == 0:", "if True:"),
    "never-reduced": _mend("add up gradients of all ranks", "lambda run: None", "add_up_gradients"),
    "buckets-reduced-before-the-last-backward": _mend(
        "after the last backward",
        "        add_up_gradients(run)\n        last.backward()",
        "        last.backward()\n        add_up_gradients(run)",
    ),
    "one-parameter-not-reduced": _mend("add up gradients of all ranks", "[:-1]", ""),
    "gradient-broadcast-from-rank-0": _mend(
        "a broadcast or a reduce in place of an all-reduce",
        "dist.broadcast(gradient, 0)",
        "dist.all_reduce(gradient)",
    ),
    "gradient-reduced-in-bfloat16": _mend(
        "in the parameter's dtype", "gradient.to(torch.bfloat16)", "gradient.clone()"
    ),
    "running-sum-reduced-each-micro-batch": _mend(
        "once per window", "            add_up_gradients(run)\n", "        add_up_gradients(run)\n"
    ),
    # JAX
    "jax-traced-count": _mend("", "first[0]", "first[-1]"),
    "jax-never-reset": _mend(ONE_RESET, "window, kept[0])", "window)"),
    "jax-times-zero-for-ever": _mend("never by multiplying", "a * 0", "jnp.zeros_like(a)"),
    "jax-scan-whole-windows": _mend(ADVANCE, ", whole=True", ""),
    "jax-bfloat16-sum": _mend("in the parameter's dtype", "jnp.bfloat16", "a.dtype"),
    "jax-carry-replaced": _mend(
        "reset once per window", "sums(params, [batch])", "sums(params, [batch], carried)"
    ),
    "jax-last-not-added": _mend("look for a `continue`", "max(1, len(window) - 1)", "len(window)"),
    "jax-first-added-twice": _mend("differentiate each loss once", "window, start)", "window)"),
    "jax-clipped-in-the-scan": _mend(
        "switch it off",
        "[clip.update(part, clip.init(params))[0] for part in parts]",
        "parts",
    ),
}
"""Bug -> its mended form."""
