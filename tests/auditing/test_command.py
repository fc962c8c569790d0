"""The command: exit status, JSON, output, and one clear line for each misuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradcheck_suite
from gradcheck_suite.__main__ import main


@pytest.fixture
def sound(scripts):
    return str(scripts / "sound_equal.py")


@pytest.fixture
def faulty(scripts):
    return str(scripts / "faulty_mean_of_means.py")


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script of one window per line of its body."""

    def write(body, loss="F.cross_entropy(model(x), y)"):
        file = tmp_path / "train.py"
        file.write_text(
            "import os, signal, sys\nimport torch\nimport torch.nn.functional as F\ntorch.manual_seed(0)\n"
            "model = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            "x, y = torch.ones(3, 2), torch.tensor([0, 1, 1])\n"
            f"for i in range(4):\n    optimizer.zero_grad()\n    {loss}.backward()\n    optimizer.step()\n{body}\n"
        )
        return str(file)

    return write


def test_the_json_has_the_verdict_the_place_and_the_weights(tmp_path, capfd, faulty, sound):
    assert main(["audit", "--json", str(tmp_path / "r.json"), faulty]) == 1
    (result,) = json.loads((tmp_path / "r.json").read_text())["results"]
    assert (result["loop"], result["verdict"], result["windows"]) == (faulty, "violated", 2)
    violation = result["violation"]
    assert (violation["kind"], violation["diagnosis"], violation["step"]) == (
        "gradient",
        "mean-of-means",
        0,
    )
    assert violation["where"].endswith("faulty_mean_of_means.py:10")
    assert violation["error"] == pytest.approx(2.5)
    for row, count in zip(violation["weights"], (4, 2, 7, 1), strict=True):
        assert row["count"] == count
        assert row["expected"] == pytest.approx(1 / 14)
        assert row["observed"] == pytest.approx(1 / (4 * count))
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("faulty_mean_of_means.py:10: mean-of-means: ") == 1  # when it was found
    assert err.count("mean-of-means at step 0") == 1  # at the end
    assert main(["audit", sound]) == 0


def test_a_fault_that_the_end_of_the_run_shows_is_explained(capfd, scripts):
    assert main(["audit", str(scripts / "faulty_tail_dropped.py")]) == 1
    err = capfd.readouterr().err
    assert err.count("went backward and never reached a step") == 1
    assert err.count("tail-dropped") == 2  # with the explanation, and at the end


def test_parameters_without_a_gradient_are_named_when_the_script_has_let_its_model_go(
    script, capfd
):
    file = script("del model, optimizer")
    Path(file).write_text(
        Path(file).read_text().replace("backward()", "backward(inputs=[model.weight])")
    )
    assert main(["audit", file]) == 0
    assert (
        "1 of 2 parameters of the optimizer got no gradient in any step (bias)"
        in capfd.readouterr().err
    )


def test_the_scripts_arguments_output_and_status_are_its_own(script, capfd):
    file = script("print(__file__, sys.argv, __name__)\nsys.exit(3)")
    assert main(["audit", "--steps", "2", file, "--steps", "9", "-m"]) == 3
    out, err = capfd.readouterr()
    assert out == f"{file} {[file, '--steps', '9', '-m']} __main__\n"
    assert "2 steps judged" in err
    assert main(["audit", script("sys.exit()")]) == 0


def test_a_scripts_file_is_absolute_as_python_has_it(script, monkeypatch, capfd):
    file = Path(script("import os\nos.chdir('/')\nprint(__file__, sys.argv[0])"))
    monkeypatch.chdir(file.parent)
    assert main(["audit", file.name]) == 0
    assert capfd.readouterr().out == f"{file} {file.name}\n"


def test_a_module_is_run_as_python_runs_it(script, tmp_path, monkeypatch, capfd):
    package = tmp_path / "package_of_an_audit"
    package.mkdir()
    (package / "__init__.py").touch()
    Path(script("print(sys.argv[1:], __name__, __package__)")).rename(package / "train.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["audit", "-m", f"{package.name}.train", "-m", "--steps", "9"]) == 0
    out, err = capfd.readouterr()
    assert out == f"['-m', '--steps', '9'] __main__ {package.name}\n"
    assert "4 steps judged of 4" in err


OF_WORKERS = """
import torch
import torch.nn.functional as F

def train(rank=0):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.long))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in torch.utils.data.DataLoader(data, batch_size=4, num_workers=1 - rank):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        RESET

if __name__ == "__main__":
    START
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("start", "reset", "status", "said"),
    [
        ("train()", "optimizer.zero_grad()", 0, "holds  2 steps judged of 2"),
        ("train()", "pass", 1, "gradient: stale-window at step 1"),
        (
            "torch.multiprocessing.spawn(train, (), 1)",
            "pass",
            2,
            "the script trains nothing, or it trains in another process",
        ),
    ],
)
def test_workers_of_a_loader_change_nothing_and_training_in_another_process_is_unjudged(
    start, reset, status, said, tmp_path
):
    file = tmp_path / "train.py"
    file.write_text(OF_WORKERS.replace("START", start).replace("RESET", reset))
    command = [sys.executable, "-m", "gradcheck_suite", "audit", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == status, done.stderr
    assert said in done.stderr


def test_an_exception_of_the_script_keeps_its_traceback(script, capfd):
    assert main(["audit", script("raise ValueError('own')")]) == 1
    err = capfd.readouterr().err
    assert "ValueError: own" in err
    assert "gradcheck_suite" not in err.split("ValueError: own")[0]
    assert "4 steps judged" in err


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("import sys\nsys.exit(4)", 4, "the script ended with status 4 before its first step"),
        ("raise ValueError('own')", 1, "the script ended with status 1 before its first step"),
        ("", 2, "the script trains nothing, or it trains in another process"),
    ],
)
def test_a_script_that_judges_nothing_says_why(body, status, said, tmp_path, capfd):
    file = tmp_path / "train.py"
    file.write_text(body)
    assert main(["audit", str(file)]) == status
    assert said in capfd.readouterr().err.splitlines()[-1]


def test_after_an_interrupt_what_was_seen_stands(script, tmp_path):
    path = tmp_path / "r.json"
    assert (
        main(["audit", "--json", str(path), script("os.kill(os.getpid(), signal.SIGINT)")]) == 130
    )
    (result,) = json.loads(path.read_text())["results"]
    assert (result["verdict"], result["interrupted"], result["windows"]) == ("holds", True, 4)


def test_what_cannot_be_judged_has_status_2_and_one_line(script, tmp_path, capfd, sound):
    opaque = "((model(x) - 1) ** 2).mean().exp()"
    unseen = script("", loss=f"{opaque}.backward(); {opaque}")
    empty = tmp_path / "empty.py"
    empty.write_text("")
    without = [word for name in ("weights", "sums", "batch") for word in ("--without", name)]
    for arguments, message in (
        ([unseen], "declare it with `loss = gradcheck_suite.objective(loss, count=n)`"),
        ([str(empty)], "no optimizer.step() was seen"),
        ([*without, sound], "every instrument was switched off"),
        (["no_such.py"], "no_such.py: no such file"),
        (["-m", "no_such_module"], "-m no_such_module: no such module"),
        (["--json", str(tmp_path / "no" / "r.json"), sound], "make it first"),
        ([], "required: SCRIPT.py (see"),
    ):
        assert main(["audit", *arguments]) == 2, arguments
        last = capfd.readouterr().err.splitlines()[-1]
        assert last.startswith("gradcheck-suite audit: error: "), arguments
        assert message in last


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (torch._C, "_current_graph_task_id"),
        (torch.autograd.Variable, "_execution_engine"),
        (torch.compiler, "set_stance"),
    ],
)
def test_a_torch_that_lacks_something_is_refused_before_the_script_starts(
    holder, name, script, monkeypatch, capfd
):
    monkeypatch.delattr(holder, name)
    assert main(["audit", script("print('started')")]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert f".{name}, which this release of gradcheck-suite needs: install a newer" in err
    assert err.count("\n") == 1


LINE = "faulty_mean_of_means.py:10"


@pytest.mark.parametrize(
    ("options", "table", "status"),
    [
        (["--accept", "mean-of-means"], "", 0),
        (["--accept", f"mean-of-means@{LINE}"], "", 0),
        (["--accept", f"mean-of-means@{LINE[:-1]}"], "", 1),
        ([], f"accept = ['stale-window', 'mean-of-means@{LINE}']", 0),
        ([], "accept = ['mean-of-means@another.py:10']", 1),
    ],
)
def test_what_is_accepted_is_counted_and_no_violation(
    options, table, status, tmp_path, capfd, faulty, monkeypatch
):
    path = tmp_path / "r.json"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(f"[tool.gradcheck-suite.audit]\n{table}\n")
    assert main(["audit", *options, "--json", str(path), faulty]) == status
    err = capfd.readouterr().err
    (result,) = json.loads(path.read_text())["results"]
    assert (result["verdict"], result["violation"] is None) == (
        ("violated", "holds")[not status],
        not status,
    )
    assert [violation["diagnosis"] for violation in result["accepted"]] == ["mean-of-means"] * (
        not status
    )
    assert ("2 steps judged of 2, 1 fault accepted" in err) == (not status)
    assert ("accepted: mean-of-means at step 0, each" in err) == (not status)
    nothing = f"--accept mean-of-means@{LINE[:-1]} matches nothing; mean-of-means is at "
    assert (nothing in err) == (bool(options) and bool(status))
    assert ("matches nothing" in err) == (bool(options) and bool(status))


WEIGHTED = """
import torch

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for sizes in ((4, 2, 1), (3, 1, 5), (6, 2, 3)):
    for n in sizes:
        loss = torch.nn.functional.cross_entropy(model(torch.randn(n, 3)), torch.zeros(n, dtype=torch.long))
        (loss * {weight}).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""Micro-batches of other sizes, whose means are weighted by `weight`, in which `n` items are of `sum(sizes)`."""


@pytest.mark.parametrize(
    ("weight", "diagnosis"),
    [
        ("n**2 / sum(m**2 for m in sizes)", "wrong-count"),
        ("round(n / sum(sizes), 2)", "low-precision"),
        ("(7.1 if n == sizes[0] else n**0.3) / 31", "unrecognised-weights"),
    ],
)
def test_what_an_audit_names_can_be_accepted(weight, diagnosis, tmp_path):
    script, path = tmp_path / "weighted.py", tmp_path / "r.json"
    script.write_text(WEIGHTED.format(weight=weight))
    assert main(["audit", "--json", str(path), str(script)]) == 1
    assert json.loads(path.read_text())["results"][0]["violation"]["diagnosis"] == diagnosis
    assert main(["audit", "--accept", diagnosis, "--json", str(path), str(script)]) == 0


def test_the_json_has_each_part_that_is_unknown_and_what_to_do(script, tmp_path):
    path, quotient = tmp_path / "r.json", "(0.01 * ((model(x) - 1) ** 2).mean()).exp()"
    file = script(
        "optimizer.zero_grad(); F.cross_entropy(model(x), y).backward(); optimizer.step()"
    )
    Path(file).write_text(
        Path(file).read_text().replace("zero_grad()", f"zero_grad(); {quotient}.backward()", 1)
    )
    assert main(["audit", "--json", str(path), file]) == 0
    (result,) = json.loads(path.read_text())["results"]
    (part,) = result["unknown"]
    assert (part["what"], part["reason"], part["steps"]) == ("weights", "Exp of a number", 4)
    assert part["where"].endswith("train.py:9")
    assert "gradcheck_suite.objective" in part["remedy"]


def test_stop_on_violation_ends_the_script_at_its_first_violation(tmp_path, faulty):
    path = tmp_path / "r.json"
    assert main(["audit", "--stop-on-violation", "--json", str(path), faulty]) == 1
    assert json.loads(path.read_text())["results"][0]["steps"] == 1


def test_given_accumulation_steps_are_held_against_every_window(script, capfd, scripts):
    for steps, sound in (("2", "sound_mean_of_two_losses"), ("4", "sound_closure")):
        assert main(["audit", "--accumulation-steps", steps, str(scripts / f"{sound}.py")]) == 0
    assert main(["audit", "--accumulation-steps", "4", script("")]) == 1
    assert "step-count: step-per-micro-batch at step 2" in capfd.readouterr().err


def test_an_audit_is_opened_once_and_alone():
    with gradcheck_suite.audit() as audit:
        with pytest.raises(gradcheck_suite.UsageError, match="another audit is open"):
            gradcheck_suite.audit().open()
        assert audit.result.verdict == "unjudged"
    with pytest.raises(gradcheck_suite.UsageError, match="was closed"):
        audit.open()
    with pytest.raises(gradcheck_suite.UsageError, match="scalar"):
        gradcheck_suite.objective([1.0], count=1)
    assert audit.close() is audit.result
