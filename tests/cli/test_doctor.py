"""`doctor`: what is here, and what is missing."""

from __future__ import annotations

from gradcheck_suite.cli import doctor
from gradcheck_suite.run import environment


def test_where_everything_is_there(run):
    outcome = run("doctor")
    assert outcome.status == 0
    assert outcome.err == ""
    for text in (
        "versions",
        "devices",
        "precision flags",
        "jax_enable_x64",
        "True",
        "kept in",
        "can run here",
    ):
        assert text in outcome.out
    for package in (
        "torch",
        "jax",
        "jaxlib",
        "numpy",
        "hypothesis",
        "pytest",
        "pytest-benchmark",
        "python",
    ):
        assert f"  {package} " in outcome.out
    assert outcome.out.endswith("verify and replay can run here\n")


def test_where_a_package_is_too_old(run, monkeypatch):
    monkeypatch.setitem(environment.MINIMUM, "jax", "99.0")
    outcome = run("doctor")
    assert outcome.status == 1
    assert "is too old: expected 99.0 or later; pip install 'jax>=99.0'" in outcome.out
    assert outcome.out.endswith("verify and replay cannot run here\n")


def test_where_the_main_job_fails(run, monkeypatch):
    def fails():
        raise OSError("libfoo.so: cannot open")

    monkeypatch.setattr(doctor, "_small_job", fails)
    outcome = run("doctor")
    assert outcome.status == 1
    assert "no: OSError: libfoo.so: cannot open" in outcome.out
