"""Optimizers are made without Dynamo, and are as torch makes them once it is imported."""

from __future__ import annotations

import subprocess
import sys
import textwrap

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


def test_dynamo_is_imported_by_what_compiles_alone():
    subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], check=True)
