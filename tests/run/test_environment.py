"""Versions, devices, flags: complete where all is there, honest where something is missing."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from gradcheck_suite.cli.doctor import MAIN, capabilities
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.run import environment


def test_the_minimum_versions_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = dict(line.split(">=") for line in project["dependencies"])
    assert {name: environment.MINIMUM[name] for name in wanted} == wanted


def test_everything_is_data():
    found = environment.environment()
    assert json.loads(json.dumps(found)) == found
    # what is installed from PyPI leaves out which build it is: "2.13.0" of a module that says
    # "2.13.0+cu130"
    assert found["versions"]["torch"] in (torch.__version__, torch.__version__.partition("+")[0])
    assert "cpu" in found["devices"]["torch"]


def test_the_flags_are_set_and_read():
    torch.set_float32_matmul_precision("medium")
    try:
        assert environment.precision_flags()["torch_float32_matmul_precision"] == "medium"
        environment.set_precision()
        flags = environment.precision_flags()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert flags["torch_float32_matmul_precision"] == "highest"
    assert flags["torch_cuda_matmul_allow_tf32"] is False
    assert flags["torch_cudnn_allow_tf32"] is False
    assert flags["jax_default_matmul_precision"] == "highest"
    assert flags["jax_enable_x64"] is True


def test_nothing_is_missing_here():
    assert environment.missing() == []
    assert capabilities()[MAIN] is None


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_framework_that_is_missing(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    assert any(reason.startswith(f"{name} is not installed") for reason in environment.missing())
    assert environment.devices()[name] == []
    assert not [flag for flag in environment.precision_flags() if flag.startswith(name)]
    assert capabilities()[MAIN] is not None
    with pytest.raises(CannotRunHere, match=f"{name} cannot be imported"):
        environment.set_precision()


@pytest.mark.parametrize(
    ("version", "old"),
    [("2.8.1", True), ("2.9.0", False), ("2.10.0+cpu", False), ("2.13.0a0+git1", False)],
)
def test_versions_compare_by_numbers(monkeypatch, version, old):
    monkeypatch.setattr(
        environment,
        "versions",
        lambda: dict.fromkeys(environment.MINIMUM, "999") | {"torch": version},
    )
    assert bool(environment.missing()) is old


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("HYPOTHESIS_STORAGE_DIRECTORY", "mine")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    environment.prepare()
    assert os.environ["JAX_PLATFORMS"] == "cuda"
    assert os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] == "mine"
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"


def test_cuda_is_refused_with_a_reason_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no CUDA device" in str(capabilities()["--device cuda"])
