"""Training scripts with layers, transformations and modes that are hard to watch, as text.

Each is sound, or divides means of unlike micro-batches by their number. What a mode or a subclass
of the script sees of it is in its list `seen`, which an audit must not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEAD = """
import warnings
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
F = nn.functional
# torch itself warns of what it calls beta, of what is slow, and of what it will drop
for text in ("Sparse CSR", "The PyTorch API of nested", "Anomaly Detection", "`torch.jit.script`"):
    warnings.filterwarnings("ignore", text)
torch.manual_seed(0)
seen = []
class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))
class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))
class Rounds(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        rounds = func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return out.bfloat16().float() if rounds else out
class Flops:
    def __enter__(self):
        self.mode = FlopCounterMode(display=False)
        return self.mode.__enter__()
    def __exit__(self, *error):
        seen.append(self.mode.get_total_flops())
        return self.mode.__exit__(*error)
class Watched:
    def __enter__(self):
        self.handles = [
            hooks.register_module_forward_pre_hook(lambda m, x: seen.append("before")),
            hooks.register_module_forward_hook(lambda m, x, y: seen.append("after")),
        ]
    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()
class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return 2 * x, 3 * x
    @staticmethod
    def backward(ctx, a, b):
        return sum(k * g for k, g in ((2, a), (3, b)) if g is not None)
class First(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * 1, y * 1
    @staticmethod
    def backward(ctx, a, b):
        return a, None
class Typed(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})
class Inside:
    def __init__(self, inner):
        self.inner, self.parameters = inner, inner.parameters
        self.named_parameters = inner.named_parameters
def pieces(x):
    return list(x.split([1, x.shape[0] - 1]))
"""


@dataclass(frozen=True)
class Layer:
    """A model of 5 inputs and 3 outputs.

    Attributes:
        parts: statements that make its parts, attributes of `self`.
        forward: an expression of `x`.
        given: what the module is called with, an expression of `x`; the script itself does the
            rest with `out`.
        out: an expression of what the module returns.
    """

    parts: str
    forward: str
    given: str = "x"
    out: str = "out"

    def text(self) -> str:
        """Return the statements that make the model `net`."""
        body = [*self.parts.splitlines()]
        lines = ["class Net(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in body]
        return "\n".join([*lines, "    def forward(self, x):", f"        return {self.forward}"])


TWO = "self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)"
LAYERS = {
    "plain": Layer(TWO, "self.b(self.a(x).tanh())"),
    "lazy": Layer(
        "self.a, self.b = nn.LazyLinear(8), nn.LazyLinear(3)", "self.b(self.a(x).tanh())"
    ),
    "lazy convolution": Layer(
        "self.a, self.b = nn.LazyConv1d(4, 3, padding=1), nn.LazyLinear(3)\n"
        "self.norm = nn.LazyBatchNorm1d()\n"
        "self.norm.eval()",
        "self.b(self.norm(self.a(x[:, None])).tanh().flatten(1))",
    ),
    "an output that is not used": Layer(TWO, "Both.apply(self.b(self.a(x).tanh()))[0]"),
    "an output that the script does not use": Layer(
        TWO, "Both.apply(self.b(self.a(x).tanh()))", out="out[0]"
    ),
    "no gradient for an input": Layer(
        f"{TWO}\nself.c = nn.Linear(5, 3)",
        "sum(k * y for k, y in zip((1, 0), First.apply(self.b(self.a(x).tanh()), self.c(x))))",
    ),
    "no gradient for a parameter with a hook": Layer(
        f"{TWO}\nself.c = nn.Parameter(torch.ones(3))\nself.c.register_hook(lambda g: g)",
        "sum(k * y for k, y in zip((1, 0), First.apply(self.b(self.a(x).tanh()), self.c)))",
    ),
    "sparse gradients": Layer(
        "self.a, self.b = nn.Embedding(7, 8, sparse=True), nn.Linear(8, 3)",
        "self.b(self.a((x[:, :2].abs() * 3).long().clamp(max=6)).sum(1))",
    ),
    "compressed rows": Layer(
        "self.a = nn.Parameter(torch.eye(5).to_sparse_csr())\nself.b = nn.Linear(5, 3)",
        "self.b(torch.sparse.mm(self.a, x.T).T)",
    ),
    "complex numbers": Layer(
        "self.a, self.b = nn.Linear(5, 8, dtype=torch.complex64), nn.Linear(8, 3)",
        "self.b(self.a(x.to(torch.complex64)).abs())",
    ),
    "complex outputs": Layer(
        "self.a = nn.Linear(5, 3, dtype=torch.complex64)",
        "self.a(x.to(torch.complex64)).conj()",
        out="out.real",
    ),
    "a jagged tensor": Layer(
        TWO,
        "self.b(self.a(torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, len(x)])))"
        ".values().tanh())",
    ),
    "a jagged output": Layer(
        "self.a = nn.Linear(5, 3)",
        "self.a(x)",
        given="torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, len(x)]))",
        out="torch.cat(list(out.unbind()))",
    ),
    "a nested tensor": Layer(
        TWO,
        "torch.cat(self.b(self.a(torch.nested.as_nested_tensor(pieces(x))).relu()).unbind())",
    ),
    "a nested output": Layer(
        "self.a = nn.Linear(5, 3)",
        "self.a(x)",
        given="torch.nested.as_nested_tensor(pieces(x))",
        out="torch.cat(out.unbind())",
    ),
    "a weight of a subclass": Layer(
        f"{TWO}\nself.b.weight = nn.Parameter(self.b.weight.detach().as_subclass(Typed))",
        "self.b(self.a(x).tanh())",
    ),
    "an input of a subclass": Layer(TWO, "self.b(self.a(x).tanh())", given="x.as_subclass(Typed)"),
    "a tensor of a subclass inside": Layer(TWO, "self.b(self.a(x.as_subclass(Typed)).tanh())"),
    "made on the meta device": Layer(
        "with torch.device('meta'):\n"
        f"    {TWO}\n"
        "    self.b(self.a(torch.randn(2, 5))).sum().backward()\n"
        "self.to_empty(device='cpu')\n"
        "self.zero_grad()\n"
        "self.a.reset_parameters(), self.b.reset_parameters()",
        "self.b(self.a(x).tanh())",
    ),
    "features without versions": Layer(
        TWO,
        "self.b(self.a(x.clone()).tanh())",
        given="torch.inference_mode()(torch.mul)(x, 1)",
    ),
    "low precision": Layer(
        "self.a, self.b = nn.Linear(5, 8).bfloat16(), nn.Linear(8, 3).half()",
        "self.b(self.a(x.bfloat16()).tanh().half()).float()",
    ),
    "an empty parameter": Layer(
        f"{TWO}\nself.none = nn.Parameter(torch.zeros(0, 3))",
        "self.b(self.a(x).tanh()) + self.none.sum(0)",
    ),
    "a parametrization": Layer(
        "self.a, self.b = nn.utils.parametrizations.weight_norm(nn.Linear(5, 8)), nn.Linear(8, 3)",
        "self.b(self.a(x).tanh())",
    ),
    "a hook of its own": Layer(
        f"{TWO}\nself.a.register_forward_hook(lambda m, x, y: seen.append('hook'))",
        "self.b(self.a(x).tanh())",
    ),
}
"""Models that are hard to watch."""

SOME = "torch.randn(2, 5)"
WEIGHTS = "[p for p in net.parameters() if p.requires_grad]"
LINEAR = "lin = nn.Linear(5, 3)\n"
BESIDE = {
    "vmap": f"{LINEAR}torch.func.vmap(lin)({SOME})",
    "gradient": f"{LINEAR}torch.func.grad(lambda x: lin(x).sum())({SOME})",
    "gradient of a call": f"{LINEAR}torch.func.grad(lambda p: "
    f"torch.func.functional_call(lin, p, ({SOME},)).sum())(dict(lin.named_parameters()))",
    "gradients of samples": f"{LINEAR}torch.func.vmap(torch.func.grad(lambda p, one: "
    "torch.func.functional_call(lin, p, (one[None],)).sum()), in_dims=(None, 0))("
    f"{{n: p.detach() for n, p in lin.named_parameters()}}, {SOME})",
    "jvp": f"{LINEAR}torch.func.jvp(lin, ({SOME},), ({SOME},))",
    "vjp": f"{LINEAR}torch.func.vjp(lin, {SOME})[1](torch.ones(2, 3))",
    "jacobian": f"{LINEAR}torch.func.jacrev(lin)({SOME}), torch.func.jacfwd(lin)({SOME})",
    "hessian": f"{LINEAR}torch.func.hessian(lambda x: lin(x).square().sum())({SOME})",
    "a vectorized jacobian": f"{LINEAR}torch.autograd.functional.jacobian(lin, {SOME}, vectorize=True)",
    "a jacobian by rows": f"{LINEAR}torch.autograd.functional.jacobian(lin, {SOME})",
    "a batch of gradients": f"{LINEAR}torch.autograd.grad(lin({SOME}).sum(0), [*lin.parameters()], "
    "torch.eye(3), is_grads_batched=True)",
    "a backward under vmap": "leaf = torch.ones(3, requires_grad=True)\nout = (leaf * 2).sum()\n"
    "torch.func.vmap(lambda v: torch.autograd.grad(out, leaf, v.sum(), retain_graph=True)[0])"
    "(torch.randn(2, 3))",
    "a dual number": f"{LINEAR}with forward_ad.dual_level():\n"
    f"    lin(forward_ad.make_dual({SOME}, {SOME}))",
    "a product with the Hessian": f"{LINEAR}given = [*lin.parameters()]\n"
    f"g = torch.autograd.grad(lin({SOME}).square().sum(), given, create_graph=True)\n"
    "torch.autograd.grad(sum(each.square().sum() for each in g), given)",
    "a complex gradient": "leaf = nn.Parameter(torch.ones(3, dtype=torch.complex64))\n"
    "(leaf * 2).sum().backward(torch.tensor(1 + 1j))",
    "a graph of operations": "from torch.fx.experimental.proxy_tensor import make_fx\n"
    f"{LINEAR}make_fx(lambda a: lin(a).sum())({SOME})",
    "fake tensors": "from torch._subclasses import FakeTensorMode\nwith FakeTensorMode():\n"
    f"    nn.Linear(5, 3)({SOME}).sum().backward()",
    "a copy": f"import copy\ncopy.deepcopy(net)({SOME}) if isinstance(net, nn.Sequential) else None",
}
"""What a script may do besides training."""

MODES = {
    "a level of dual numbers": "forward_ad.dual_level()",
    "operations": "Operations()",
    "functions": "Functions()",
    "flops": "Flops()",
    "a device": "torch.device('cpu')",
    "hooks of all modules": "Watched()",
    "anomalies": "torch.autograd.detect_anomaly(check_nan=False)",
    "saved on the CPU": "torch.autograd.graph.save_on_cpu()",
    "saved tensors may change": "torch.autograd.graph.allow_mutation_on_saved_tensors()",
    "subclasses off": "torch._C.DisableTorchFunctionSubclass()",
}
"""Contexts around a part of a script."""
PARTS = ("all", "forward", "backward", "step")
"""What is in the contexts."""


@dataclass(frozen=True)
class Script:
    """A script.

    Attributes:
        layer: a key of `LAYERS`.
        beside: keys of `BESIDE`.
        modes: keys of `MODES`, the outermost first.
        part: of the script that is in the modes, one of `PARTS`.
        faulty: whether it divides means of unlike micro-batches by their number.
        called_first: whether the model is called, and goes backward, before the optimizer is made.
    """

    layer: str = "plain"
    beside: Sequence[str] = ()
    modes: Sequence[str] = ()
    part: str = "all"
    faulty: bool = False
    called_first: bool = False

    def text(self) -> str:
        """Return the script."""
        layer = LAYERS[self.layer]
        windows = [[4, 2, 7, 3], [3, 3], [2, 5]] if self.faulty else [[4, 4], [4, 4], [4, 4]]
        loss = [f"out = net({layer.given})", f"loss = F.cross_entropy({layer.out}, y) / len(sizes)"]
        first = ["sizes, x, y = [1], torch.randn(4, 5), torch.randint(0, 3, (4,))", *loss]
        first += ["loss.backward()"]
        # an optimizer of torch updates no parameter of compressed rows
        trained = "net.b.parameters()" if self.layer == "compressed rows" else "net.parameters()"
        one = [
            "x, y = torch.randn(n, 5), torch.randint(0, 3, (n,))",
            *self._in_modes("forward", loss),
            *self._in_modes("backward", ["loss.backward()"]),
            *(line for name in self.beside for line in BESIDE[name].splitlines()),
        ]
        loop = [
            f"for sizes in {windows}:",
            "    opt.zero_grad()",
            "    for n in sizes:",
            *_indented(_indented(one)),
            *_indented(self._in_modes("step", ["opt.step()"])),
        ]
        lines = [
            *layer.text().splitlines(),
            "net = Net()",
            *(first if self.called_first else []),
            f"opt = torch.optim.SGD({trained}, lr=0.1)",
            *self._in_modes("all", loop),
            "trained = [p.detach() for p in net.parameters()]",
        ]
        return HEAD + "\n".join(lines) + "\n"

    def _in_modes(self, part: str, lines: list[str]) -> list[str]:
        if part != self.part or not self.modes:
            return lines
        return [f"with {', '.join(MODES[mode] for mode in self.modes)}:", *_indented(lines)]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
