"""What is printed where: colours, whole lines, outputs that are closed or full, files that cannot
be written.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradcheck_suite.cli import PROGRAM
from gradcheck_suite.core.records import FOLDER, KINDS, SCHEMA, append_record, expect_schema
from gradcheck_suite.core.results import Result, Violation
from gradcheck_suite.core.text import of_bound, say
from gradcheck_suite.errors import UsageError

ESCAPE = "\x1b["
SOUND = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    BEFORE
    torch.nn.functional.mse_loss(model(torch.ones(2, 2)), torch.ones(2, 1)).backward()
    optimizer.step()
    RESET
"""


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script which is sound, or whose gradients are never reset."""

    def write(*, sound=True, before="pass", after=""):
        text = SOUND.replace("RESET", "optimizer.zero_grad()" if sound else "pass").replace(
            "BEFORE", before
        )
        (tmp_path / "train.py").write_text(text + after)
        return "train.py"

    return write


def command(*arguments, cwd, **settings):
    """Run the command line in a process of its own."""
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    settings = {"capture_output": True, "text": True, "env": buffered, **settings}
    given = [sys.executable, "-m", "gradcheck_suite", *map(str, arguments)]
    return subprocess.run(given, cwd=cwd, timeout=300, check=False, **settings)


def on_a_terminal(*lines, width=60, **environment):
    """Return what `say` writes to a terminal."""
    code = "import sys\nfrom gradcheck_suite.core.text import say\nsay(sys.argv[1:])"
    main, side = pty.openpty()
    kept = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")
    }
    about = {**kept, "COLUMNS": str(width), "TERM": "xterm-256color", **environment}
    subprocess.run(
        [sys.executable, "-c", code, *lines], stdout=side, env=about, timeout=60, check=True
    )
    os.close(side)
    found = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        found += part
    os.close(main)
    return found.decode().replace("\r\n", "\n")


HOLDS, VIOLATED = "loop.py:train  holds      3 cases", "loop.py:train  VIOLATED   3 cases"


def test_a_terminal_has_colours_unless_they_are_unwanted_and_a_pipe_where_they_are_forced(
    capsys, monkeypatch
):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert f"{ESCAPE}1;32mholds" in on_a_terminal(HOLDS)
    assert f"{ESCAPE}1;31mVIOLATED" in on_a_terminal(VIOLATED)
    assert not re.search(r"\x1b\[[\d;]*3\d", on_a_terminal(HOLDS, NO_COLOR="1"))
    say([HOLDS])
    assert capsys.readouterr().out == f"{HOLDS}\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    say([HOLDS])
    assert ESCAPE in capsys.readouterr().out


def test_long_lines_are_wrapped_at_words_and_what_is_copied_stays_whole():
    words = "step      " + " ".join(f"word{i}" for i in range(30))
    replay = (
        f"    replay  gradcheck-suite replay reports/counterexamples/{'x' * 60}.json --time-limit 3"
    )
    example = f"    @example(Case({', '.join(f'field_{i}=1' for i in range(30))}))"
    printed = on_a_terminal(words, replay, example, NO_COLOR="1").splitlines()
    assert printed[-2:] == [replay, example]
    assert len(printed) > 5
    assert all(len(line) <= 60 for line in printed[:-2])
    assert all(line.startswith(" " * len("step      ")) for line in printed[1:-2])
    assert " ".join(" ".join(printed[:-2]).split()) == " ".join(words.split())


def test_a_pipe_gets_whole_lines(capsys):
    line = "word " * 100 + "end"
    say([line])
    assert capsys.readouterr().out == f"{line}\n"


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (0, "0%"),
        (0.00034, "0.034%"),
        (0.91, "91%"),
        (0.994, "99%"),
        (0.9962, "99.62%"),
        (1, "100%"),
    ],
)
def test_an_error_is_a_share_of_the_rounding_bound(ratio, said):
    assert of_bound(ratio) == f"{said} of the rounding bound"


STARTS = "open('started', 'w')"
BAR = "import sys; sys.stderr.write('\\r 50%|###   | 1/2'); sys.stderr.flush()"


@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.full
def test_a_headline_stands_on_a_line_of_its_own_where_a_progress_bar_stands(
    script, tmp_path, sound
):
    lines = command("audit", script(sound=sound, before=BAR), cwd=tmp_path).stderr.splitlines()
    assert [line for line in lines if line.startswith("train.py  ")], "the verdict hangs on a bar"
    assert sound or [line for line in lines if line.startswith("train.py:7: stale-window: ")], (
        "the fault hangs on it"
    )


# Outputs that take nothing.


@pytest.mark.parametrize(("sound", "status"), [(True, 2), (False, 1)])
@pytest.mark.full
def test_a_full_standard_output_is_said_in_one_line_and_changes_no_violation(
    script, tmp_path, sound, status
):
    file = script(sound=sound, before="print('of the script')")
    with Path("/dev/full").open("w") as full:
        done = command(
            "audit", file, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, capture_output=False
        )
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("standard output cannot be written (No space left on device)") == 1
    assert "train.py  holds" in done.stderr or not sound


UNBUFFERED = pytest.mark.parametrize("unbuffered", ["", "1"])


@UNBUFFERED
@pytest.mark.full
def test_verify_whose_verdict_goes_nowhere_fails_at_once(tmp_path, unbuffered):
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = command(
            "verify",
            "--list",
            cwd=tmp_path,
            env=env,
            stdout=full,
            stderr=subprocess.PIPE,
            capture_output=False,
        )
    assert done.returncode == 2
    said = "standard output cannot be written (No space left on device): send it elsewhere"
    assert done.stderr == f"gradcheck-suite verify: error: {said}\n"


@UNBUFFERED
@pytest.mark.full
def test_a_closed_pipe_ends_the_command_without_a_word(tmp_path, unbuffered):
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    read, write = os.pipe()
    os.close(read)
    done = command(
        "verify",
        "--list",
        cwd=tmp_path,
        env=env,
        stdout=write,
        stderr=subprocess.PIPE,
        capture_output=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (2, "")


def test_words_to_a_closed_pipe_end_no_program():
    read, write = os.pipe()
    os.close(read)
    # rich would raise SystemExit(1), which reads as an exit of the code under test
    with pytest.raises(BrokenPipeError), os.fdopen(write, "w", buffering=1) as pipe:
        say(["a word"], pipe)


@pytest.mark.parametrize("how", ["sys.stdout.close()", "os.close(1)"])
@pytest.mark.parametrize(("sound", "status"), [(True, 0), (False, 1)])
@pytest.mark.full
def test_a_standard_output_that_the_script_closed_changes_nothing(
    script, tmp_path, how, sound, status
):
    done = command("audit", script(sound=sound, after=f"import os, sys; {how}"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (status, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("train.py  ") == 1


@pytest.mark.full
def test_an_output_that_was_closed_before_the_start_gives_its_number_to_no_file(tmp_path):
    shell = [
        "sh",
        "-c",
        f"'{sys.executable}' -m gradcheck_suite verify zero_ -n 1 --json rows.json >&-",
    ]
    done = subprocess.run(
        shell, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    json.loads((tmp_path / "rows.json").read_text())


@pytest.mark.full
def test_json_and_reports_are_where_the_command_began(script, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    file = script(before="import os; os.chdir('/')")
    done = command(
        "audit", "--json", "r.json", "--reports", "kept", "--html", "p.html", file, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        "elsewhere",
        "train.py",
        "r.json",
        "kept",
        "p.html",
    }


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_what_cannot_be_written_is_refused_before_the_script_starts(script, tmp_path, option):
    done = command("audit", option, "no/such/r", script(before=STARTS), cwd=tmp_path)
    assert done.returncode == 2
    said = f"{option} no/such/r: there is no folder no/such; make it first\n"
    assert re.fullmatch(rf"[^\n]*{said}", done.stderr)
    assert not (tmp_path / "started").exists()


# Files that cannot be written after all: the verdict first, and its status.


@pytest.mark.parametrize(("sound", "status"), [(True, 0), (False, 1)])
@pytest.mark.full
def test_after_a_full_disk_the_verdict_of_an_audit_stands(script, tmp_path, sound, status):
    (tmp_path / "reports" / FOLDER).mkdir(parents=True)
    (tmp_path / "reports" / FOLDER / "audit.jsonl").symlink_to("/dev/full")
    done = command(
        "audit", "--json", "/dev/full", "--reports", "reports", script(sound=sound), cwd=tmp_path
    )
    assert done.returncode == status
    *_, first, second = done.stderr.splitlines()
    assert first == "gradcheck-suite audit: error: cannot write /dev/full: No space left on device"
    assert second.startswith("gradcheck-suite audit: error: cannot write ")
    assert done.stderr.index("train.py  ") < done.stderr.index(first)


def planted(monkeypatch, violation=None):
    from gradcheck_suite.verification import verify as verification

    result = Result("zero_", 2, 0.1, judged=2, violations=() if violation is None else (violation,))
    monkeypatch.setattr(verification, "verify", lambda *_, **__: result)


@pytest.mark.parametrize("violated", [False, True])
def test_after_a_full_disk_the_verdict_of_verify_stands(
    run, project, monkeypatch, a_case, violated
):
    planted(monkeypatch, Violation("raised", "raised", "planted", a_case) if violated else None)
    (project / "reports" / FOLDER).mkdir(parents=True)
    (project / "reports" / FOLDER / "verify.jsonl").symlink_to("/dev/full")
    outcome = run("verify", "zero_", "--json", "/dev/full", "--reports", "reports")
    assert outcome.status == int(violated)
    assert re.search(r"zero_ +(VIOLATED|holds) +2 cases", outcome.out)
    assert (
        len(re.findall("^gradcheck-suite verify: error: cannot write ", outcome.err, re.MULTILINE))
        == 2
    )
    assert "Traceback" not in outcome.err


# Records: where they are asked for, and in one schema.


def test_nothing_is_recorded_unless_it_is_asked_for(run, project, monkeypatch):
    planted(monkeypatch)
    tracked = project / "reports" / FOLDER / "verify.jsonl"
    tracked.parent.mkdir(parents=True)
    tracked.write_text('{"schema": 1, "kind": "verify", "data": {}}\n')
    kept = tracked.read_bytes()
    assert run("verify", "zero_").status == 0
    assert [path for path in (project / "reports").rglob("*") if path.is_file()] == [tracked]
    assert tracked.read_bytes() == kept
    assert run("verify", "zero_", "--reports", "reports").status == 0
    assert tracked.read_bytes().startswith(kept)
    assert tracked.read_bytes().count(b"\n") == 2


def test_records_of_another_schema_are_added_to_by_nobody(run, project, tmp_path):
    path = append_record(tmp_path, KINDS["verify"], {}, environment={})
    expect_schema(path)
    path.write_text(path.read_text().replace(f'"schema": {SCHEMA}', '"schema": 99'))
    with pytest.raises(
        UsageError, match="holds records of schema 99, and this version writes schema 1"
    ):
        append_record(tmp_path, KINDS["verify"], {}, environment={})
    assert path.read_text().count("\n") == 1
    outcome = run("verify", "zero_", "--reports", tmp_path)
    assert outcome.status == 2
    assert "schema 99" in outcome.err


# Short options.


def test_quiet_prints_each_verdict_in_one_line(run, project, monkeypatch, a_case):
    planted(monkeypatch, Violation("raised", "raised", "planted", a_case))
    outcome = run("verify", "zero_", "zero_grad", "-q")
    assert outcome.status == 1
    assert re.fullmatch(r"(zero_ +VIOLATED +2 cases +\d+\.\d s  raised\n){2}", outcome.out)


def test_x_stops_after_the_first_violated_loop(run, project, monkeypatch, a_case):
    planted(monkeypatch, Violation("raised", "raised", "planted", a_case))
    assert run("verify", "zero_", "zero_grad", "-x").out.count("VIOLATED") == 1


@pytest.mark.full
def test_n_x_q_and_html_of_an_audit(script, tmp_path):
    done = command("audit", "-n", "2", "-q", script(), cwd=tmp_path)
    assert re.fullmatch(r"train\.py  holds  2 steps judged of 2  [\d.]+ s\n", done.stderr)
    done = command("audit", "-x", "--html", "page.html", script(sound=False), cwd=tmp_path)
    assert "2 steps judged of 2" in done.stderr
    page = (tmp_path / "page.html").read_text()
    assert "<title>train.py: gradient: stale-window at step 1</title>" in page
    marked = re.findall(
        r'<tr class="(\w+)"><td class="number">(\d+)</td><td><code>([^<]*)</code>', page
    )
    source = (tmp_path / "train.py").read_text().splitlines()
    assert {name for name, _, _ in marked} >= {"loss", "step"}
    for name, number, _ in marked:
        assert {"loss": "mse_loss", "backward": "backward", "step": ".step()"}[name] in source[
            int(number) - 1
        ]


def expect_examples_that_parse(program, name):
    for example in program.commands[name].examples:
        line = re.split(r" {3,}", example)[0].split()
        assert line[0] == name
        program.parser(name).parse_args(line[1:])


@pytest.mark.parametrize("name", PROGRAM.commands)
def test_every_commands_help_has_examples_that_its_parser_takes(run, name):
    assert f"examples:\n  gradcheck-suite {name}" in run(name, "--help").out
    expect_examples_that_parse(PROGRAM, name)
