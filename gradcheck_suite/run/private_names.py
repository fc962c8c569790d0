"""The private names of torch and JAX that the suite uses, in one table.

A release may rename them without a word. Each command asks for its names before it starts, so that
what a release lacks is one line and no traceback in the middle of somebody's run. Whoever adapts
the suite to a new release starts here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.run.environment import MINIMUM


@dataclass(frozen=True)
class PrivateNames:
    """Names of one package that one command uses and the package does not document.

    Attributes:
        user: the command that needs them.
        package: that defines them.
        needed: dotted names without which the command cannot run. They begin with the package's
            module, or with one of `HOLDERS`.
        optional: names that are looked for on objects of the program and used where they are:
            those of one kind of module, or of later releases alone.
    """

    user: str
    package: str
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()


TABLE = (
    PrivateNames(
        "audit",
        "torch",
        (
            "torch.autograd.Variable._execution_engine",
            "torch._C._current_graph_task_id",
            "torch._C._autograd._top_saved_tensors_default_hooks",
            "torch._C._autograd._unsafe_set_version_counter",
            "torch._C._DisableTorchDispatch",
            "torch._C._EnableTorchFunction",
            "torch._C._disabled_torch_dispatch_impl",
            "torch._C._dispatch_key_parse",
            "torch._C._dispatch_keys",
            "torch._C._len_torch_dispatch_stack",
            "torch._C._len_torch_function_stack",
            "torch._C._pop_torch_function_stack",
            "torch._C._push_on_torch_function_stack",
            "torch._C._functorch.is_functorch_wrapped_tensor",
            "torch._C._functorch.peek_interpreter_stack",
            "torch._C._dynamo.eval_frame.set_code_exec_strategy",
            "torch._C._dynamo.eval_frame._FrameExecStrategy",
            "torch._C._dynamo.eval_frame._FrameAction",
            "torch._C._dynamo.eval_frame.set_eval_frame",
            "torch._is_functional_tensor",
            "torch.autograd._get_sequence_nr",
            "torch.compiler.is_dynamo_compiling",
            "torch.compiler.set_stance",
            "torch.nn.modules.dropout._DropoutNd",
            "torch.nn.modules.module._has_any_global_hook",
            "torch.nn.modules.module._global_forward_hooks_with_kwargs",
            "torch.nn.modules.module._global_backward_hooks",
            "torch.nn.modules.module._global_backward_pre_hooks",
            "torch.nn.modules.module._global_forward_hooks",
            "torch.nn.modules.module._global_forward_pre_hooks",
            "torch.utils._device.DeviceContext",
            "torch.utils._pytree.tree_flatten",
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.utils._python_dispatch._pop_mode",
            "torch.utils._python_dispatch._push_mode",
            "Node._input_metadata",
            "Node._saved_dim",
            "Node._sequence_nr",
            "Node.metadata",
            "Node.register_prehook",
            "Node.next_functions",
            "NllLossBackward0._raw_saved_target",
            "NllLossBackward0._saved_target",
            "NllLossBackward0._saved_total_weight",
            "NllLossBackward0._saved_reduction",
            "NllLossBackward0._saved_ignore_index",
            "Module._buffers",
            "Module._compiled_call_impl",
            "Module._forward_hooks",
            "Module._forward_pre_hooks",
            "Optimizer._optimizer_step_pre_hooks",
            "Tensor._backward_hooks",
            "Tensor._post_accumulate_grad_hooks",
            "Tensor._version",
        ),
        (
            "_forward_cls",  # of the node of a custom Function
            "_library",  # where torch keeps the operators of `torch.library.custom_op`
            "_backend_fns",
            "_init_fn",
            "_scale",  # of a GradScaler, once it has scaled
            "_init_scale",  # of one that has not
            "_per_optimizer_states",
            "_torchdynamo_disable",  # of a function that dynamo must not trace
            "_indices",  # of a sparse tensor
            "_values",
            # of modules that FSDP has wrapped, and of their parameters
            "_flat_param",
            "_fsdp_flattened",
            "_fsdp_param_groups",
            "_get_fsdp_state",
            "_gradient_postdivide_factor",
            "_gradient_predivide_factor",
            "_is_flat_param",
            # what nodes of a kind have saved, from which the value of a loss is computed
            "_saved_alpha",
            "_saved_beta",
            "_saved_delta",
            "_saved_dim0",
            "_saved_dim1",
            "_saved_dim2",
            "_saved_dims",
            "_saved_exponent",
            "_saved_index",
            "_saved_keepdim",
            "_saved_max",
            "_saved_min",
            "_saved_offset",
            "_saved_ord",
            "_saved_target_lengths",
            "_saved_threshold",
            "_saved_training",
        ),
    ),
    PrivateNames(
        "verify",
        "torch",
        (
            "torch._decomp.get_decompositions",
            "torch.library._impls",
            "torch.nn.modules.batchnorm._BatchNorm",
            "torch.nn.modules.batchnorm._NormBase",
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.utils._pytree.tree_map_only",
            "Module._parameters",
            "Tensor._base",
            "Tensor._post_accumulate_grad_hooks",
        ),
        ("_op_impls", "_check_with"),  # of a library that a loop has opened; of torch, in attention
    ),
    # a Problem's own model goes over the bridge to JAX
    PrivateNames(
        "verify",
        "torch",
        (
            "torch._C._set_grad_enabled",
            "torch._decomp.get_decompositions",
            "torch._export.utils._materialize_cpp_cia_ops",
            "torch._ops.OpOverload",
            "torch._ops.OperatorBase",
            "torch._subclasses.fake_tensor.FakeTensor",
            "torch.ops.aten.add.Tensor._overloadname",
            "torch.utils._pytree.tree_map",
            "Module._backward_hooks",
            "Module._backward_pre_hooks",
            "Tensor._backward_hooks",
            "Tensor._post_accumulate_grad_hooks",
        ),
    ),
    PrivateNames(
        "port",
        "torch",
        (
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.utils._python_dispatch._disable_current_modes",
            "torch.autograd.function._SingleLevelFunction",
            "torch.utils._pytree.tree_map",
            "Module._apply",
            "Optimizer._optimizer_step_post_hooks",
        ),
    ),
    PrivateNames(
        "verify",
        "jax",
        (
            "jax.core.Tracer",
            "jax.custom_derivatives.SymbolicZero",
            "jax.experimental.io_callback",
            "jax.experimental.serialize_executable.serialize",
        ),
    ),
    PrivateNames(
        "audit",
        "jax",
        (
            "jax._src.api_util.infer_argnums_and_argnames",
            "jax._src.core.trace_state_clean",
            "jax.core.Tracer",
            "jax.core.eval_jaxpr",
            "jax.extend.core.Literal",
            "jax.extend.core.Primitive",
            "jax.interpreters.ad.primitive_jvps",
            "jax.interpreters.batching.fancy_primitive_batchers",
            "jax.interpreters.mlir.register_lowering",
            "jax.interpreters.partial_eval.dce_jaxpr",
            "jax.lax.cond_p",
            "jax.lax.pcast",
            "jax.lax.scan_p",
            "jax.lax.while_p",
            "jax.shard_map",
            "jax.typeof",
        ),
        ("infer_params", "_trace"),  # by which `jax.pmap` prepares a call; of a tracer
    ),
    PrivateNames(
        "port",
        "jax",
        (
            "jax.core.Tracer",
            "jax.core.eval_jaxpr",
            "jax.extend.core.Literal",
            "jax.interpreters.partial_eval.dce_jaxpr",
        ),
    ),
)
"""What the suite uses of torch and JAX beside their documentation; JAX documents `jax.core` and
`jax.interpreters` as subject to change.
"""


def _holders() -> dict[str, Any]:
    """Return an object of each kind that private attributes are read from."""
    import torch

    leaf = torch.zeros(1, 2, requires_grad=True)
    leaf.register_hook(lambda gradient: None)
    loss: Any = torch.nn.functional.nll_loss(torch.cat([leaf * 1]), torch.tensor([0])).grad_fn
    return {
        "Node": loss.next_functions[0][0],
        "NllLossBackward0": loss,
        "Tensor": leaf,
        "Module": torch.nn.Identity(),
    }


def _example_optimizer() -> Any:
    import torch

    return torch.optim.SGD([torch.zeros(1, requires_grad=True)])


# takes a second: made for the names that need it alone
_MADE: dict[str, Callable[[], Any]] = {"Optimizer": _example_optimizer}


def _exists(name: str, holders: dict[str, Any]) -> bool:
    """Return whether a dotted name is there, importing the modules on its way."""
    first, *parts = name.split(".")
    value = holders.get(first)
    if value is None:
        value = importlib.import_module(first)
    path = first
    for part in parts:
        path = f"{path}.{part}"
        if not hasattr(value, part) and first in ("torch", "jax"):
            try:
                importlib.import_module(path)
            except ImportError:
                return False
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def lacking(rows: Iterable[PrivateNames]) -> list[tuple[str, str]]:
    """Return what the installed releases lack of some rows: the package, and the name."""
    holders: dict[str, Any] = {}
    missing = []
    for row in rows:
        if row.package == "torch" and not holders:
            holders = _holders()
        for name in row.needed:
            kind = name.partition(".")[0]
            if kind in _MADE and kind not in holders:
                holders[kind] = _MADE[kind]()
            if not _exists(name, holders):
                missing.append((row.package, name))
    return missing


def expect_present(user: str, package: str | None = None) -> None:
    """Refuse a release that lacks private names which a part of the suite uses.

    Args:
        user: the command.
        package: of which the names are asked for; None for all.

    Raises:
        CannotRunHere: some are missing. The line says which, and the versions that have them.
    """
    rows = [row for row in TABLE if row.user == user and package in (None, row.package)]
    missing = lacking(rows)
    if not missing:
        return
    named = ", ".join(name for _, name in missing)
    packages = sorted({package for package, _ in missing})
    versions = " and ".join(f"{one} {importlib.metadata.version(one)}" for one in packages)
    lowest = " and ".join(f"{one} {MINIMUM[one]}" for one in packages)
    raise CannotRunHere(
        f"{user}: {versions} has no {named}, which this release of gradcheck-suite needs:"
        f" install a newer gradcheck-suite, or an older release (from {lowest} on)"
    )
