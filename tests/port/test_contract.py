"""What outside code relies on: kinds of models, options, exit statuses, JSON, and one clear line
for a bad pair.
"""

from __future__ import annotations

import json
import textwrap
from importlib.resources import files
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

from gradcheck_suite import Port, Result, UsageError, ViolationFound, compare_port
from gradcheck_suite.cli import run
from gradcheck_suite.core.formats import Accepted
from gradcheck_suite.port.compare import judge_function
from gradcheck_suite.port.result import PortFinding
from tests.port.pairs import Head, drawn, head, images, pair_of

# a machine that is lent to run tests of CUDA may lack it, and collects every file
Draft202012Validator = pytest.importorskip("jsonschema").Draft202012Validator
SCHEMA = json.loads(files("gradcheck_suite.core").joinpath("result.schema.json").read_text())
PAIR = """
    import jax.numpy as jnp, numpy as np, torch
    from torch import nn

    def pair({parameters}):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4{eps}))
        def apply(p, x):
            x = x @ p["w"].T + p["b"]
            x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
            return x * p["scale"] + p["shift"]
        names = {{"w": "0.weight", "b": "0.bias", "scale": "1.weight", "shift": "1.bias"}}
        params = {{k: jnp.asarray(module.state_dict()[v].numpy()) for k, v in names.items()}}
        x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
        return {{"module": module, "apply": apply, "params": params, "inputs": (x,){more}}}
"""


def written(folder: Any, *, parameters: str = "", eps: str = "", more: str = "") -> str:
    """Write a pair; return what names it on a command line."""
    file = folder / "my_port.py"
    file.write_text(textwrap.dedent(PAIR).format(parameters=parameters, eps=eps, more=more))
    return f"{file}:pair"


# Kinds of models.


def linen_head() -> dict[str, Any]:
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(3, name="last")(jnp.tanh(linen.Dense(5, name="first")(x)))

    def load(s: dict[str, Any]) -> dict[str, Any]:
        return {
            n: {"kernel": s[f"{n}.weight"].T, "bias": s[f"{n}.bias"]} for n in ("first", "last")
        }

    torch.manual_seed(4)
    return pair_of(Head(), Model(), (drawn(6, 4),), load)


def nnx_head() -> dict[str, Any]:
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.first, self.last = (
                nnx.Linear(4, 5, rngs=nnx.Rngs(0)),
                nnx.Linear(5, 3, rngs=nnx.Rngs(0)),
            )

        def __call__(self, x: Any) -> Any:
            return self.last(jnp.tanh(self.first(x)))

    torch.manual_seed(4)
    module, model = Head(), Model()
    for name in ("first", "last"):
        own, other = getattr(module, name), getattr(model, name)
        other.kernel, other.bias = (
            nnx.Param(jnp.asarray(v.detach().numpy())) for v in (own.weight.T, own.bias)
        )
    return {"module": module, "apply": model, "inputs": (drawn(6, 4),)}


def equinox_head() -> dict[str, Any]:
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        first: Any
        last: Any

        def __call__(self, x: Any) -> Any:
            return jax.vmap(lambda row: self.last(jnp.tanh(self.first(row))))(x)

    torch.manual_seed(4)
    module, key = Head(), jax.random.key(0)
    model = Model(eqx.nn.Linear(4, 5, key=key), eqx.nn.Linear(5, 3, key=key))
    values = [
        jnp.asarray(module.state_dict()[n].numpy())
        for n in ("first.weight", "first.bias", "last.weight", "last.bias")
    ]
    places = lambda m: [m.first.weight, m.first.bias, m.last.weight, m.last.bias]  # noqa: E731 - tree_at takes one
    return {"module": module, "apply": eqx.tree_at(places, model, values), "inputs": (drawn(6, 4),)}


def swapped(made: dict[str, Any]) -> dict[str, Any]:
    """Plant a fault of the torch side: the port keeps tanh."""
    return {**made, "module": WithRelu.like(made["module"])}


class WithRelu(Head):
    """`Head` with another activation."""

    @classmethod
    def like(cls, other: nn.Module) -> WithRelu:
        made = cls()
        made.load_state_dict(other.state_dict())
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x).relu())
        return out


@pytest.mark.parametrize("make", [head, linen_head, nnx_head, equinox_head])
def test_each_kind_of_model_is_judged(make):
    sound = judge_function(make, "sound")
    assert sound.verdict == "holds", str(sound)
    assert {row.how for row in sound.map} <= {"same", "transposed"}
    assert len(sound.map) == 4
    found = judge_function(lambda: swapped(make()), "faulty")
    assert [(f.kind, f.place, f.cause) for f in found.findings] == [
        ("forward", "", "activation")
    ], str(found)


def test_a_port_and_a_dict_with_or_without_load_get_one_verdict():
    made = head()
    without = {k: v for k, v in made.items() if k != "load"}
    results = [judge_function(lambda g=given: g, "pair") for given in (made, Port(**made), without)]
    results.append(compare_port(Port(**made)))
    results.append(
        compare_port(made["module"], made["apply"], *made["inputs"], params=made["params"])
    )
    assert {r.verdict for r in results} == {"holds"}
    assert len({tuple((row.leaf, row.torch) for row in r.map) for r in results}) == 1


def test_the_modules_state_is_put_back():
    made = head()
    before = {n: v.clone() for n, v in made["module"].state_dict().items()}
    compare_port(Port(**made))
    for name, value in made["module"].state_dict().items():
        torch.testing.assert_close(value, before[name].double(), rtol=0, atol=0)


# The bound, from both sides.


@pytest.mark.parametrize(("off", "verdict"), [(1e-12, "holds"), (1e-7, "differs")])
def test_the_bound_is_between_rounding_and_a_fault(off, verdict):
    made = head()
    apply = made["apply"]
    made["apply"] = lambda p, x: apply(p, x) * (1 + off)
    assert judge_function(lambda: made, "pair").verdict == verdict


@pytest.mark.parametrize(("off", "verdict"), [(1e-13, "holds"), (1e-6, "differs")])
def test_so_is_that_of_a_gradient(off, verdict):
    made = head()
    apply = made["apply"]

    def scaled(p: Any, x: Any) -> Any:
        out = apply(p, x)
        return out + off * (out - jax.lax.stop_gradient(out))

    made["apply"] = scaled
    result = judge_function(lambda: made, "pair")
    assert result.verdict == verdict, str(result)
    assert {f.kind for f in result.findings} <= {"gradient"}


def test_no_gradient_at_all_is_a_verdict_of_its_own():
    made = head()
    apply = made["apply"]
    made["apply"] = lambda p, x: apply(jax.lax.stop_gradient(p), x)
    found = judge_function(lambda: made, "pair").findings
    assert {(f.kind, f.cause) for f in found} <= {
        ("gradient", "no-gradient"),
        ("gradient", "stop-gradient"),
    }
    assert found


def test_a_gradient_that_is_nan_on_one_side_is_found():
    made = head()
    apply = made["apply"]

    def bad(p: Any, x: Any) -> Any:  # the gradient of the branch that is not taken is 0 * inf
        out = apply(p, x)
        zero = out - jax.lax.stop_gradient(out)
        return jnp.where(zero == 0, out, jnp.sqrt(zero))

    made["apply"] = bad
    result = judge_function(lambda: made, "pair")
    assert {f.kind for f in result.findings} == {"gradient"}, str(result)


# Training.


class Normed(nn.Module):
    """A batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x)
        return out


@pytest.mark.parametrize(
    ("momentum", "cause"), [(0.1, None), (0.9, "momentum-convention"), (0.01, "momentum")]
)
def test_running_statistics_after_a_step(momentum, cause):
    def apply(p: Any, x: Any) -> Any:
        mean, var = x.mean(0), x.var(0)
        new = {
            "mean": (1 - momentum) * p["norm.running_mean"] + momentum * mean,
            "var": (1 - momentum) * p["norm.running_var"] + momentum * x.var(0, ddof=1),
        }
        return (x - mean) / jnp.sqrt(var + 1e-5) * p["norm.weight"] + p["norm.bias"], new

    result = judge_function(lambda: pair_of(Normed(), apply, (drawn(7, 3),), train=True), "pair")
    assert {(f.kind, f.cause) for f in result.findings} == (
        {("state", cause)} if cause else set()
    ), str(result)
    assert "running statistics" in result.judged


# The verdict.


def test_what_holds_says_how_it_would_have_failed():
    result = judge_function(head, "pair")
    assert "found, off by" in result.planted
    assert any(line.startswith("planted: ") for line in result.lines)


def test_an_accepted_cause_is_reported_and_no_fault():
    result = judge_function(lambda: images("eps", accept=("eps",)), "pair")
    assert result.verdict == "holds"
    assert [f.cause for f in result.accepted] == ["eps"]
    assert any(line.startswith("accepted: eps at batch") for line in result.lines)


def test_a_fault_that_needs_other_inputs_is_shown_on_small_ones():
    """The port reads the last element, torch the last one that counts.

    The given lengths do not tell.
    """

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
            return self.map(x)[torch.arange(len(x)), length - 1]

    def apply(p: Any, x: Any, length: Any) -> Any:
        return (x @ p["map.weight"].T + p["map.bias"])[:, -1]

    inputs = (drawn(3, 4, 2), np.full(3, 4))

    def draw(seed: int) -> Any:
        return inputs[0], np.random.default_rng(seed).integers(1, 5, 3)

    result = judge_function(lambda: pair_of(Last(), apply, inputs, draw=draw), "pair")
    assert result.verdict == "differs"
    assert any("input 1" in line for line in result.smallest)


def test_the_map_has_the_whole_path_of_a_module_named_value():
    def load(s: Any) -> Any:
        return {
            "value": {"kernel": s["first.weight"].T},
            "rest": {k: v for k, v in s.items() if k != "first.weight"},
        }

    pair = head()

    def apply(p: Any, x: Any) -> Any:
        return pair["apply"]({**p["rest"], "first.weight": p["value"]["kernel"].T}, x)

    result = judge_function(
        lambda: {**pair, "apply": apply, "load": load, "params": load(pair["params"])}, "pair"
    )
    assert result.verdict == "holds", str(result)
    assert "value.kernel" in {row.leaf for row in result.map}


def test_inputs_may_be_tensors():
    result = judge_function(lambda: {**head(), "inputs": (torch.as_tensor(drawn(6, 4)),)}, "pair")
    assert result.verdict == "holds", str(result)


# Bad pairs.


class Fails(Head):
    """A module that raises."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no\nsuch luck")


def bad(**changes: Any) -> dict[str, Any]:
    return {k: v for k, v in {**head(), **changes}.items() if v is not None}


def no_apply(*_: Any) -> Any:
    raise KeyError("w")


class Dropping(Head):
    """A module with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, 0.1)


BAD: dict[str, tuple[Any, str]] = {
    "key": (lambda: bad(module=None), "the pair has no 'module'"),
    "misspelt": (
        lambda: {"input" if k == "inputs" else k: v for k, v in head().items()},
        "no 'inputs', but 'input':",
    ),
    "kind": (lambda: bad(module=3), "module: expected a torch.nn.Module, got int"),
    "torch raises": (lambda: bad(module=Fails()), "the torch module raised ValueError"),
    "no line": (lambda: bad(apply=jax.nn.relu), "the JAX side raised TypeError: The input"),
    "jax raises": (lambda: bad(apply=no_apply), "the JAX side raised KeyError"),
    "load raises": (lambda: bad(load=lambda s: s["nothing"]), "load raised KeyError"),
    "NaN": (lambda: bad(inputs=(drawn(6, 4) * np.nan,)), "both sides are NaN"),
    "no rows": (lambda: bad(inputs=(drawn(0, 4),)), "input 0 is empty, of shape (0, 4)"),
    "dropout": (lambda: bad(module=Dropping(), train=True), "drop is Dropout"),
    "other values": (
        lambda: bad(load=None, params={k: 0.123 + 0 * v for k, v in head()["params"].items()}),
        "no parameter in common",
    ),
    "one optimizer": (lambda: bad(torch_optimizer=sgd), "both torch_optimizer and jax_optimizer"),
    "no optimizer": (
        lambda: bad(torch_optimizer=sgd, jax_optimizer=3),
        "jax_optimizer: expected an optax.GradientTransformation, got 3",
    ),
    "one loss": (lambda: bad(torch_loss=lambda o: o.sum()), "both torch_loss and jax_loss"),
    "no scalar": (lambda: bad(torch_loss=lambda o: o, jax_loss=lambda o: o), "expected a scalar"),
    "accept": (lambda: bad(accept=("epps",)), "'epps' is no cause"),
    "no pair": (lambda: 3, "expected a gradcheck_suite.Port or a dict"),
}


def test_an_output_of_another_shape_differs():
    result = judge_function(
        lambda: bad(apply=lambda p, x: x[:, :2] + p["last.bias"][0]), "of another shape"
    )
    assert [(f.cause, f.kind) for f in result.differences] == [("shape", "forward")]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_pair_gets_one_clear_line(name):
    make, words = BAD[name]
    with pytest.raises(UsageError) as caught:
        judge_function(make, "pair")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# The command.


def test_the_command(tmp_path, capsys):
    path, page = tmp_path / "out.json", tmp_path / "page.html"
    options = ["--map", "-n", "3", "--seed", "5", "--dtype", "float32"]
    status = run(["port", written(tmp_path), "--json", str(path), "--html", str(page), *options])
    out = capsys.readouterr()
    assert status == 0, out
    assert "holds" in out.out
    assert "w      same        0.weight" in out.out
    assert "in float32 the port's error" in out.out
    document = json.loads(path.read_text())
    Draft202012Validator(SCHEMA).validate(document)
    (result,) = document["results"]
    assert (result["verdict"], result["holds"], result["findings"]) == ("holds", True, [])
    assert result["loop"].endswith("my_port.py:pair")
    assert "w      same        0.weight" in page.read_text()  # the map is on the page


def test_a_port_that_differs_exits_with_1_and_names_the_lines(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert run(["port", written(tmp_path, eps=", eps=1e-3"), "--json", str(path)]) == 1
    document = json.loads(path.read_text())
    Draft202012Validator(SCHEMA).validate(document)
    (finding,) = document["results"][0]["findings"]
    assert (finding["kind"], finding["place"], finding["cause"]) == ("forward", "1", "eps")
    assert finding["jax"].startswith("my_port.py:")
    assert finding["error"] > finding["allowed"] > 0
    assert "eps 1e-05 instead of 0.001" in finding["words"]
    assert "fix: pass torch's eps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('fault = "eps", file = "my_port.py"', "accepted: eps at 1:"),
        ('fault = "eps", file = "other.py"', "DIFFERS"),
        ('fault = "eps", file = "my_port.py", line = 1', "DIFFERS"),
        ('fault = "scale", file = "my_port.py"', "DIFFERS"),
    ],
)
def test_what_the_project_accepts_is_accepted_by_a_port(tmp_path, monkeypatch, capsys, entry, said):
    monkeypatch.chdir(tmp_path)
    pair = written(tmp_path, eps=", eps=1e-3")
    accept = f'accept = [{{{entry}, reason = "as it was trained"}}]'
    (tmp_path / "pyproject.toml").write_text(f"[tool.gradcheck-suite]\n{accept}\n")
    status = run(["port", "-n", "1", "--output-format", "github", pair.rpartition("/")[2]])
    out = capsys.readouterr()
    assert said in out.err
    assert status == (said == "DIFFERS"), out
    assert ("(accepted%3A as it was trained)" in out.out) == (said != "DIFFERS")
    # its file was judged, and what it accepts is not there
    is_gone = "not found again" in out.err
    assert is_gone == (said == "DIFFERS" and "my_port.py" in entry)


@pytest.mark.parametrize(
    ("accepted", "status"),
    [("eps", 0), ("eps@my_port.py", 0), ("eps@my_port.py:1", 1), ("gelu-approximation", 1)],
)
def test_the_option_accept_is_that_of_an_audit(tmp_path, capsys, accepted, status):
    pair = written(tmp_path, eps=", eps=1e-3")
    assert run(["port", "-n", "1", "--accept", accepted, pair]) == status, capsys.readouterr()


def test_the_result_is_a_result_whose_violations_are_its_differences():
    result = judge_function(lambda: images("eps"), "pair.py:pair")
    assert isinstance(result, Result)
    assert result.violation is not None
    assert (result.violation.diagnosis, result.violation.kind) == ("eps", "forward")
    assert result.violation.fix.startswith("pass torch's eps")
    assert result.findings == result.violations
    with pytest.raises(ViolationFound, match="DIFFERS"):
        result.raise_for_violation()
    accepted = result.accepting([Accepted.read("eps", "as it was trained")])
    assert (accepted.verdict, len(accepted.accepted)) == ("holds", 1)
    assert result.accepting([Accepted.read("scale", "why")]).verdict == "differs"


@pytest.mark.parametrize(
    ("entries", "is_accepted"),
    [(["eps"], False), (["eps", "scale"], True), (["eps", "scale@b.py"], False), (["sign"], False)],
)
def test_of_several_causes_each_is_to_be_accepted(entries, is_accepted):
    both = PortFinding.of("forward", "norm", "eps and scale", "two numbers", jax="a.py:3")
    fits = both.accepted_by([Accepted.read(text, "why") for text in entries])
    assert bool(fits) == is_accepted


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"parameters": "a, b"}, "pair"),
        ({"more": ', "train": True, "module": nn.Dropout(0.5)'}, "Dropout"),
        ({"more": ', "params": {"w": jnp.zeros(1)}'}, "no parameter in common"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(tmp_path, capsys, how, words):
    assert run(["port", written(tmp_path, **how)]) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1
    assert words in lines[0]
    assert "Traceback" not in captured.out + captured.err


def test_a_dict_with_an_unknown_key_says_so(tmp_path, capsys):
    assert run(["port", written(tmp_path, more=', "inptus": 3')]) == 0
    assert "the key 'inptus' is not used (did you mean 'inputs'?)" in capsys.readouterr().out


def test_the_fixture_fails_with_the_verdict(assert_same_port):
    made = head()
    assert assert_same_port(Port(**made)).holds
    with pytest.raises(pytest.fail.Exception, match="activation"):
        assert_same_port(Port(**swapped(made)))


def test_updates_of_linen_leave_running_statistics_alone():
    made = linen_head()
    made |= {"torch_optimizer": lambda p: torch.optim.SGD(p, 0.1), "jax_optimizer": optax.sgd(0.2)}
    found = judge_function(lambda: made, "pair").findings
    assert [(f.kind, f.cause) for f in found] == [("update", "learning-rate")]
