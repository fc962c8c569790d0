"""The public function: compare a torch module with a JAX model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradcheck_suite.core.formats import Accepted
from gradcheck_suite.core.options import PortOptions, options_of, takes
from gradcheck_suite.errors import UsageError
from gradcheck_suite.port.judge import judged
from gradcheck_suite.port.pair import Port, as_port, call_user_code, float64_allowed
from gradcheck_suite.port.result import PortResult
from gradcheck_suite.run import environment


@takes(PortOptions)
def compare_port(
    module: Any, jax_model: Any = None, *inputs: Any, name: str | None = None, **options: Any
) -> PortResult:
    """Return whether a JAX model is a torch module: outputs, gradients, updates, and where and why
    not.

    The module's state is put back; it stays in float64.

    Args:
        module: a `torch.nn.Module`, or a `Port` alone.
        jax_model: a function of `params` and the inputs, or a model of flax linen, flax nnx or
            Equinox.
        inputs: numpy arrays that both get.
        name: of the pair in the verdict.
        options: the other attributes of `Port`, such as `params` and `load`, and those below.

    Raises:
        UsageError: the pair cannot be judged.
    """
    environment.set_precision()
    own = {one.name for one in options_of(PortOptions)}
    chosen = PortOptions().replace(**{k: v for k, v in options.items() if k in own})
    given: Any = module
    if not isinstance(module, Port):
        try:
            given = Port(
                module,
                jax_model,
                inputs=inputs,
                **{k: v for k, v in options.items() if k not in own},
            )
        except TypeError as error:
            raise UsageError(f"compare_port: {error}") from None
    pair, notes = as_port(given)
    return judged(pair, notes, name or type(pair.module).__name__, chosen)


def judge_function(
    make: Callable[[], Any],
    label: str,
    options: PortOptions | None = None,
    baseline: Sequence[Accepted] = (),
) -> PortResult:
    """Return the verdict on the pair that a function returns.

    Args:
        make: the author's function; it is called again where the pair has no `load`.
        label: its name, as the user gave it.
        options: of the comparison.
        baseline: what the project accepts.

    Raises:
        UsageError: the pair cannot be judged.
    """
    environment.set_precision()
    pair, notes = as_port(call_user_code(label, float64_allowed()(make)), make)
    return judged(
        pair,
        notes,
        label,
        options or PortOptions(),
        baseline,
    )
