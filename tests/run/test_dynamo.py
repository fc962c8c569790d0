"""Nothing of eager torch imports Dynamo or sympy, and all is as torch has it once Dynamo is imported."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import sys
    import torch
    from gradcheck_suite.run import environment
    from gradcheck_suite.run.optimizers import optimizer_of

    environment.set_precision()
    model = torch.nn.Linear(2, 1)
    for name in (None, "sgd", "momentum", "normalized"):
        optimizer = optimizer_of(name, model)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "torch._dynamo" not in sys.modules
    assert "sympy" not in sys.modules

    method = torch.optim.Optimizer.add_param_group.__wrapped__
    assert vars(method)["__dynamo_disable"] is method
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    assert compiled(torch.ones(1)) == 2
    assert "__dynamo_disable" not in vars(method)
    optimizer_of("sgd", model)
    assert vars(method)["__dynamo_disable"] is not method
"""


@pytest.mark.share(4)
def test_dynamo_is_imported_by_what_compiles_alone():
    subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], check=True)


WITHOUT = """
    import sys
    import torch
    from gradcheck_suite.run import environment

    environment.set_precision()
    from gradcheck_suite.reference.rounding import RandomRounding

    attention = torch.nn.MultiheadAttention(2, 1, batch_first=True)
    x = torch.ones(1, 3, 2)
    padded = torch.tensor([[False, False, True]])
    attention(x, x, x, key_padding_mask=padded)
    with RandomRounding(0, torch.float64):
        torch.ones(2) + 1
    assert "torch._dynamo" not in sys.modules
    assert "sympy" not in sys.modules
    try:
        attention(x, x, x, key_padding_mask=padded[:, :2])
    except AssertionError as error:
        assert "shape[1] to be 3, but got 2" in str(error)
    else:
        raise SystemExit("a mask of another length was taken")

    import torch._dynamo
    assert torch._check_with.__module__ == "torch" and not hasattr(torch._check_with, "__wrapped__")
"""


@pytest.mark.full
def test_modes_and_masks_import_no_compiler():
    subprocess.run([sys.executable, "-c", textwrap.dedent(WITHOUT)], check=True)


NORMALIZED = """
    import sys
    import torch
    from gradcheck_suite.run import environment

    environment.set_precision()
    from gradcheck_suite.reference.rounding import RandomRounding

    with RandomRounding(0, torch.float64):
        layer = torch.nn.LayerNorm(3, dtype=torch.float64)
        layer(torch.rand(4, 3, dtype=torch.float64)).sum().backward()
    assert layer.weight.grad is not None
    assert "sympy" not in sys.modules
"""


@pytest.mark.share(4)
def test_the_gradient_of_a_layer_norm_imports_no_compiler():
    subprocess.run([sys.executable, "-c", textwrap.dedent(NORMALIZED)], check=True)
