"""The time limit: it ends what hangs, and leaves no trace behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from gradcheck_suite.run.time_limits import Allowance, TimedOut, time_limit

SHORT, LONGER = 0.05, 0.5
FOREVER = 20.0


def _hang():
    end = time.monotonic() + FOREVER
    while time.monotonic() < end:
        pass


@pytest.mark.parametrize(
    ("passed", "computed", "over"),
    [
        (30.0, 30.0, True),
        (29.9, 35.0, False),  # in several threads
        (30.0, 29.0, False),
        (30.0, 10.0, False),  # a third: others had the processor
        (30.0, 0.5, True),  # idle
        (299.0, 10.0, False),
        (300.0, 10.0, True),  # no more than ten limits in all
    ],
)
def test_a_busy_machine_gives_more_time(passed, computed, over):
    assert Allowance(30.0, [1.0, 5.0]).is_over(passed, [1.0 + computed, 5.0], lambda: False) == over


def test_a_block_that_is_kept_from_the_processor_is_not_stopped_at_its_limit(monkeypatch):
    started = time.monotonic()
    # others take three quarters: of each second that passes, the process's own clock shows a
    # quarter
    monkeypatch.setattr("time.process_time", lambda: (time.monotonic() - started) / 4)
    with time_limit(SHORT) as limit:
        while time.monotonic() - started < 3 * SHORT:
            pass
    assert not limit.expired


@pytest.fixture
def slow_module(tmp_path, monkeypatch):
    """The name of a module whose import takes three and a half times `LONGER`."""
    (tmp_path / "slow_to_import.py").write_text(f"import time\ntime.sleep({3.5 * LONGER})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "slow_to_import"
    sys.modules.pop("slow_to_import", None)


@pytest.mark.share(4)
def test_an_import_does_not_count(slow_module):
    """Nor does its rest after the limit began anew: the block waits, which would be stopped at
    once.
    """
    with time_limit(LONGER) as limit:
        __import__(slow_module)
        time.sleep(0.7 * LONGER)
    assert not limit.expired


def _swallows_everything():
    for _ in range(5):
        try:
            _hang()
        except BaseException:
            continue


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "block", [_hang, lambda: (__import__("slow_to_import"), _hang()), _swallows_everything]
)
@pytest.mark.usefixtures("slow_module")
def test_what_hangs_is_stopped(block):
    started = time.monotonic()
    with pytest.raises(TimedOut), time_limit(SHORT) as limit:
        block()
    assert limit.expired
    assert time.monotonic() - started < FOREVER / 2


def test_an_import_that_never_ends_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("gradcheck_suite.run.time_limits.STARTUP_S", 3 * SHORT)
    (tmp_path / "endless_import.py").write_text(f"import time\ntime.sleep({FOREVER})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TimedOut), time_limit(SHORT):
        __import__("endless_import")


@pytest.mark.parametrize("hangs", [False, True])
def test_the_timer_the_handler_and_the_tracer_are_as_before(hangs):
    def mine(signum, frame):
        pass

    previous = signal.signal(signal.SIGALRM, mine)
    tracer = sys.gettrace()
    try:
        try:
            with time_limit(SHORT if hangs else FOREVER):
                if hangs:
                    _hang()
        except TimedOut:
            assert hangs
        assert signal.getsignal(signal.SIGALRM) is mine
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        assert sys.gettrace() is tracer
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_none_is_no_limit():
    with time_limit(None) as limit:
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert not limit.expired


def test_another_thread_has_no_limit_and_no_error():
    seen = []

    def work():
        with time_limit(SHORT) as limit:
            time.sleep(3 * SHORT)
        seen.append(limit.expired)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


STOPPED = """
import os, signal, subprocess, sys, time
from gradcheck_suite.run.time_limits import time_limit
waker = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(1.5); os.kill({os.getpid()}, 18)"])
with time_limit(0.8) as limit:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep({seconds})
print("returned")
waker.wait()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
@pytest.mark.full
@pytest.mark.parametrize(("seconds", "returns"), [(0.2, True), (5.0, False)])
def test_the_time_in_which_the_process_is_stopped_does_not_count(seconds, returns):
    script = STOPPED.replace("{seconds}", str(seconds))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert ("returned" in done.stdout) == returns
    assert returns or "TimedOut" in done.stderr
