"""Ctrl-C where Python can raise nothing: it is noted, and nothing is printed."""

from __future__ import annotations

import gc
import signal

from gradcheck_suite.cli.exit_status import noted_interrupts


class _Finalised:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


class _Raises:
    def __del__(self) -> None:
        raise ValueError("told of")


def test_an_interrupt_inside_a_finaliser_is_noted_and_not_printed(capsys):
    with noted_interrupts() as pressed:
        _Finalised()
        gc.collect()
    assert pressed == [signal.SIGINT]
    assert capsys.readouterr().err == ""


def test_whatever_else_a_finaliser_raises_is_reported(monkeypatch):
    seen = []
    monkeypatch.setattr("sys.unraisablehook", seen.append)
    with noted_interrupts():
        _Raises()
        gc.collect()
    assert [str(one.exc_value) for one in seen] == ["told of"]


def test_an_interrupt_that_was_lost_during_start_up_is_noticed_by_the_work_that_follows():
    with noted_interrupts():
        _Finalised()
        gc.collect()
        with noted_interrupts() as pressed:
            assert pressed == [signal.SIGINT]
