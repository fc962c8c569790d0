"""What ends a script under an audit: a signal, its own handlers, and an exception; each with what was
seen so far.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

TRAINS = """
import multiprocessing, os, signal, sys, time
import torch
import torch.nn.functional as F
torch.manual_seed(0)
model = torch.nn.Linear(5, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
{before}
for step in range(8):
    for rows in ((4, 2), (3, 3))[step % 2]:
        loss = F.cross_entropy(model(torch.randn(rows, 5)), torch.randint(0, 3, (rows,)))
        (loss / 2).backward()
    opt.step()
    opt.zero_grad()
    if step == 5:
        {then}
"""


def _ended(folder, before: str, then: str, *wrapper: str):
    """Run a script, plain and under an audit; return the plain process, the other one, and the
    verdict, whether it was interrupted, and the judged windows of its JSON.
    """
    script, written = folder / "train.py", folder / "result.json"
    script.write_text(TRAINS.format(before=before, then=then))
    audit = ["-m", "gradcheck_suite", "audit", "--json", str(written)]
    plain, audited = (
        subprocess.run(
            [*wrapper, sys.executable, *words, str(script)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        for words in ([], audit)
    )
    (result,) = json.loads(written.read_text())["results"]
    return plain, audited, (result["verdict"], result["interrupted"], result["windows"])


@pytest.mark.share(8)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_the_process_after_the_verdict(name, tmp_path):
    before = "unfinished = sys.stdout.write('in the buffer')"
    plain, audited, seen = _ended(tmp_path, before, f"os.kill(os.getpid(), signal.{name})")
    assert plain.returncode == audited.returncode == -getattr(signal, name)
    assert plain.stdout == audited.stdout
    assert seen == ("violated", True, 6)
    assert "mean-of-means at step 0" in audited.stderr


@pytest.mark.full
def test_timeout_ends_it_as_it_ends_the_script(tmp_path):
    # so long that both have trained for six windows
    plain, audited, seen = _ended(tmp_path, "", "time.sleep(100)", "timeout", "20")
    assert plain.returncode == audited.returncode == 124
    assert seen == ("violated", True, 6)


@pytest.mark.share(8)
@pytest.mark.parametrize(
    ("before", "status", "prints"),
    [
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))", 9, ""),
        # as Lightning, which sets its own only where there is none
        (
            "if signal.getsignal(signal.SIGTERM) in (None, signal.SIG_DFL):\n"
            "    signal.signal(signal.SIGTERM, lambda *_: (print('own'), sys.exit(9)))",
            9,
            "own\n",
        ),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", 0, ""),
        # puts back what it has found, and ends by it
        (
            "def own(*_):\n"
            "    print('own', flush=True)\n"
            "    signal.signal(signal.SIGTERM, before)\n"
            "    os.kill(os.getpid(), signal.SIGTERM)\n"
            "before = signal.signal(signal.SIGTERM, own)",
            -signal.SIGTERM,
            "own\n",
        ),
    ],
    ids=["exits", "where there is none", "ignores", "puts back"],
)
def test_a_handler_of_the_script_has_its_way(before, status, prints, tmp_path):
    plain, audited, seen = _ended(tmp_path, before, "os.kill(os.getpid(), signal.SIGTERM)")
    assert (plain.returncode, plain.stdout, audited.stdout) == (status, prints, prints)
    # a violation outweighs the script's own status
    assert audited.returncode == (status if status < 0 else 1)
    assert seen == ("violated", status < 0, 8 if status == 0 else 6)


@pytest.mark.full
def test_a_child_dies_by_the_signal_alone(tmp_path):
    then = (
        "one = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "        one.start(), one.terminate(), one.join(), print(one.exitcode)"
    )
    plain, audited, seen = _ended(tmp_path, "", then)
    assert plain.stdout == audited.stdout == f"{-signal.SIGTERM}\n"
    assert seen == ("violated", False, 8)
    assert audited.stderr.count("VIOLATED") == 1


@pytest.mark.share(4)
def test_a_signal_that_comes_while_the_audit_works_waits_for_it(tmp_path):
    # planted: the signal comes in the middle of a step's judgement
    before = (
        "from gradcheck_suite.auditing import judge\n"
        "take, seen = judge.AuditJudge.take, []\n"
        "def taken(self, row):\n"
        "    seen.append(1)\n"
        "    if len(seen) == 9:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return take(self, row)\n"
        "judge.AuditJudge.take = taken"
    )
    _, audited, seen = _ended(tmp_path, before, "pass")
    assert audited.returncode == -signal.SIGTERM
    assert seen == ("violated", True, 3)


@pytest.mark.full
def test_a_signal_in_the_middle_of_a_write_to_a_full_pipe(tmp_path):
    script, written = tmp_path / "train.py", tmp_path / "result.json"
    script.write_text(TRAINS.format(before="", then="print('x' * (1 << 20))"))
    words = ["-m", "gradcheck_suite", "audit", "--json", str(written), str(script)]
    one = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert one.stdout is not None
    assert one.stdout.read(1) == "x"  # it writes now, and nobody reads on
    one.terminate()
    assert one.stderr is not None
    assert "VIOLATED" in one.stderr.read()
    assert one.wait(60) == -signal.SIGTERM
    one.stdout.close()
    one.stderr.close()
    assert json.loads(written.read_text())["results"][0]["windows"] == 6


@pytest.mark.share(6)
@pytest.mark.parametrize(
    ("hook", "said", "status"),
    [
        ("print('mine', kind.__name__, tb.tb_lineno, file=sys.stderr)", "mine ValueError 18\n", 1),
        ("sys.exit(5)", "", 5),
        ("raise KeyError('in the hook')", "Error in sys.excepthook:\n", 1),
    ],
)
def test_the_hook_of_the_script_sees_what_it_raises(hook, said, status, tmp_path):
    before = f"def hook(kind, error, tb):\n    {hook}\nsys.excepthook = hook"
    plain, audited, seen = _ended(tmp_path, before, "raise ValueError('own')")
    assert plain.returncode == status
    assert plain.stderr.startswith(said)
    assert plain.stderr.strip() in audited.stderr
    assert audited.returncode == 1
    assert seen == ("violated", False, 6)
