"""A loop that changes torch for the whole process is named, and the change is undone before a
reference is computed.
"""

from __future__ import annotations

import sysconfig

import pytest
import torch
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradcheck_suite import verify
from gradcheck_suite.cli.loading import resolve_loop
from gradcheck_suite.core.case import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.loops.reset_modes import plain
from gradcheck_suite.run import torch_state
from gradcheck_suite.verification.check import check

CASE = Case(
    ProblemSpec(Input("vector", size=1), (Layer("linear", features=1, bias=True),), Loss("mse")),
    Plan((1, 2), 2),
)


def global_hook(run):
    torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: 2 * output)
    plain(run)


def step_hook(run):
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: None)
    plain(run)


def gradient_twice(run, grad=torch.autograd.grad):
    torch.autograd.grad = lambda *args, **kwargs: tuple(2 * g for g in grad(*args, **kwargs))
    plain(run)


def step_twice_as_long(run, kernel=torch.optim.SGD.step):
    torch.optim.SGD.step = lambda self, closure=None: kernel(self, kernel(self, closure))
    plain(run)


def another_linear_in_float32(run, linear=functional.linear):
    functional.linear = lambda x, *weights: (
        linear(x, *weights) * (1.5 if x.dtype == torch.float32 else 1)
    )
    plain(run)


def own_method_of_a_class(run, of_base=torch.nn.Module.__call__):
    torch.nn.Linear.__call__ = lambda self, x: 2 * of_base(self, x)
    plain(run)


def two_functions_of_torch_exchanged(run):
    functional.relu, functional.gelu = functional.gelu, functional.relu
    plain(run)


def another_kernel(run):
    library = torch.library.Library("aten", "IMPL")
    library.impl(
        "gelu_backward",
        lambda gradient, x, approximate="none": gradient,
        "CPU",
        allow_override=True,
    )
    KEPT.append(library)
    plain(run)


KEPT: list[torch.library.Library] = []
PLANTED = {
    global_hook: "global forward hooks of torch have global_hook",
    step_hook: "global optimizer pre hooks of torch have step_hook",
    gradient_twice: "torch.autograd.grad is gradient_twice",
    step_twice_as_long: "torch.optim.SGD.step is step_twice_as_long",
    another_linear_in_float32: "torch.nn.functional.linear is another_linear_in_float32",
    own_method_of_a_class: "torch.nn.Linear.__call__ is own_method_of_a_class",
    two_functions_of_torch_exchanged: "torch.nn.functional.gelu is relu",
    another_kernel: "the kernel aten/gelu_backward/CPU is another",
}


def slope_of_gelu() -> float:
    x = torch.zeros(1, requires_grad=True)
    functional.gelu(x).backward()
    return float(x.grad)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("loop", PLANTED, ids=lambda loop: loop.__name__)
def test_a_change_of_torch_is_named_and_undone(loop):
    with torch_state.changes_undone() as left:
        violation = check(loop, CASE).violation
        assert (violation.kind, violation.diagnosis) == ("parameters", "changed-torch")
        assert PLANTED[loop] in violation.explanation
    assert left == []
    assert slope_of_gelu() == 0.5
    assert check(plain, CASE).holds


def undone_by_the_loop(run, linear=functional.linear):
    functional.linear = lambda *args: linear(*args)
    functional.linear = linear
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    plain(run)
    hook.remove()


def hooks_of_its_own(run):
    run.model.register_forward_hook(lambda module, args, output: None)
    run.model.forward = run.model.forward
    run.optimizer.step = run.optimizer.step
    plain(run)


def another_name_in_torch(run):
    torch.Tensor.of_a_library = lambda self: self
    plain(run)
    del torch.Tensor.of_a_library


def first_use_of_an_optimizer(run):
    # torch wraps the step of a class when its first optimizer is made
    kind = type("Own", (torch.optim.Rprop,), {})
    torch.optim.lr_scheduler.StepLR(kind([torch.zeros(1)]), 1)
    plain(run)


@pytest.mark.parametrize(
    "loop", [undone_by_the_loop, hooks_of_its_own, another_name_in_torch, first_use_of_an_optimizer]
)
def test_what_leaves_torch_as_it_was_is_no_fault(loop):
    assert check(loop, CASE).holds


def test_a_change_by_an_installed_package_is_no_fault():
    package = {"F": functional, "linear": functional.linear}
    source = "def patch():\n    F.linear = lambda *args: linear(*args)"
    exec(compile(source, sysconfig.get_path("purelib") + "/package.py", "exec"), package)

    def loop(run):
        package["patch"]()
        plain(run)

    try:
        assert check(loop, CASE).holds
    finally:
        functional.linear = package["linear"]


WRONG_GELU = """
import torch
import torch.nn.functional as F
from gradcheck_suite.loops.reset_modes import plain as train

gelu = F.gelu

class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gelu(x)

    @staticmethod
    def backward(ctx, gradient):
        return 1.05 * gradient

F.gelu = lambda x, approximate="none": Wrong.apply(x) if x.dtype == torch.float32 else gelu(x, approximate=approximate)

def loop(run):
    train(run)
"""


def test_what_a_loops_file_changes_when_it_is_imported_is_named(tmp_path):
    # in float64 it reaches no model, and in float32 torch's own reference would be as wrong as the
    # loop's gradient
    (tmp_path / "wrong_gelu.py").write_text(WRONG_GELU)
    loop = resolve_loop(f"{tmp_path / 'wrong_gelu.py'}:loop")
    assert slope_of_gelu() == 0.5
    for dtype in ("float64", "float32"):
        result = verify(loop, examples=1, dtype=dtype, quiet=True)
        assert result.violation.diagnosis == "changed-torch"
        assert (
            "torch.nn.functional.gelu is <lambda> (wrong_gelu.py, line 17)"
            in result.violation.explanation
        )
