"""Run public training scripts as they are, with and without the audit: is what it says of each the
truth?

The table `public_scripts.toml` beside this module has a row for each run: repository, commit, file,
how it was made small and offline, and what is true of it, worked out by reading before the run. The
scripts themselves are not kept here: FOLDER/owner/name has the checkout of each repository. Every
run happens twice in a fresh folder, with and without the audit, and the two must leave the same
files and the same parameters. `--needs` prints what to install.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.arguments import Parser
from gradcheck_suite.core.records import append_record, read_records, write_text
from gradcheck_suite.errors import UsageError
from gradcheck_suite.run import environment
from studies.records import KINDS

TABLE = Path(__file__).with_suffix(".toml")
KIND = "public-script"
MARK = "<!-- the table, written by `python -m studies scripts --page PAGE` -->\n"
TRUTHS = ("holds", "violated", "partial")
OUTCOMES = ("right", "partial", "misleading", "wrong", "harmed", "not run")
"""`partial`: what could be judged is right, and the rest is said to be unknown. `misleading`: a violation with another
name or place than the true one. `harmed`: the script ends otherwise than without the audit, or its files differ."""
UNKNOWN = re.compile(r"weights (of this loss )?(are|is) unknown|are not added up|were judged")
"""What a finding says where a part of a run could not be judged."""
LIMIT_S = 400
OBSERVER = """
import atexit, hashlib, json, os, time, torch
from torch.optim.optimizer import register_optimizer_step_post_hook

seen = {}

@register_optimizer_step_post_hook
def _count(optimizer, *_):
    seen.setdefault(id(optimizer), [optimizer, 0])[1] += 1

def _let_go():
    # a Gloo thread takes the GIL to let go of a collective; the group waits for it with the GIL (pytorch#56297), so
    # that a script of several ranks may wait for ever when its group dies, audited or not
    if "RANK" in os.environ:
        time.sleep(1)

destroy = torch.distributed.destroy_process_group
torch.distributed.destroy_process_group = lambda *args, **kwargs: (_let_go(), destroy(*args, **kwargs))[1]

@atexit.register
def _tell():
    _let_go()
    held = {id(p): p.detach() for o, _ in seen.values() for group in o.param_groups for p in group["params"]}
    values = [getattr(p, "_local_tensor", p).cpu().contiguous().flatten() for p in held.values()]
    digest = hashlib.sha256(b"".join(one.view(torch.uint8).numpy().tobytes() for one in values)).hexdigest()
    told = {"steps": sum(n for _, n in seen.values()), "parameters": sum(map(len, values)), "digest": digest}
    if seen:
        with open(f"{os.environ['PUBLIC_SCRIPT_SEEN']}/{os.environ.get('RANK', '0')}.json", "w") as file:
            json.dump(told, file)
"""
"""Runs in the script's process, with the audit and without: the steps of its optimizers, and its last parameters."""
OFFLINE = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
    "WANDB_MODE": "disabled",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "agg",
}


@dataclass(frozen=True)
class Script:
    """One run of a public script.

    Attributes:
        repository: `owner/name` on GitHub.
        commit: 40 hexadecimal digits.
        file: path in the repository.
        kind: of task, such as `language`.
        framework: what its loop is written with, such as `accelerate` or `plain`.
        truth: one of `TRUTHS`.
        why: how the truth was worked out by reading.
        arguments: of the script; `{data}` is the folder of the run, `{checkout}` that of the
            repository.
        names: the diagnoses of which each violation must have one, where the truth is `violated`.
        place: `file.py:first-last`, the lines of which a violation must name one, or empty.
        packages: what must be installed beside torch.
        data: Python that writes tiny data into the current folder; `checkout` is the repository's
            folder.
        stubs: name of a module -> the source of its stand-in, or `@name` of one in the table's
            `[stubs]`; `package.module` where `package` has a stub too. The maker of the data sees
            them too.
        changes: what was made small, and how, in words.
        replace: pairs of old and new text of the script, where arguments do not do.
        driver: Python that runs instead of the file, where the file defines functions only.
        path: folders of the repository that modules are imported from.
        audit: further options of the audit.
        k: backward passes of a whole window.
        ranks: number of processes, under torchrun where there are several.
        environment: variables.
    """

    repository: str
    commit: str
    file: str
    kind: str
    framework: str
    truth: str
    why: str
    arguments: Sequence[str] = ()
    names: Sequence[str] = ()
    place: str = ""
    packages: Sequence[str] = ()
    data: str = ""
    stubs: Mapping[str, str] = field(default_factory=dict)
    changes: str = ""
    replace: Sequence[Sequence[str]] = ()
    driver: str = ""
    path: Sequence[str] = ()
    audit: Sequence[str] = ()
    k: int = 1
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What tells runs apart."""
        return " ".join([self.repository, self.file, *self.arguments, *self.audit])


def scripts(path: Path = TABLE) -> list[Script]:
    """Return the rows of a table.

    Raises:
        UsageError: a row is not well-formed.
    """
    found = []
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    shared = {f"@{name}": source for name, source in table.get("stubs", {}).items()}
    for row in table["script"]:
        stubs = {name: shared.get(source, source) for name, source in row.get("stubs", {}).items()}
        try:
            found.append(Script(**{**row, "stubs": stubs}))
        except TypeError as error:
            raise UsageError(f"{path.name}: {row.get('file')}: {error}") from None
    if twice := [
        key for key, number in Counter(script.key for script in found).items() if number > 1
    ]:
        raise UsageError(f"{twice[0]}: two rows are the same run")
    return found


def _absent(packages: Iterable[str]) -> list[str]:
    found = []
    for name in packages:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(name)
    return found


@dataclass
class Ended:
    """How a run ended.

    Attributes:
        status: its exit status.
        seconds: wall-clock time of the process.
        files: names of the files that it left, digits replaced by `#`.
        told: what `OBSERVER` saw, of each rank.
        result: of the audit as JSON data; empty without one.
        log: the end of what it printed.
    """

    status: int
    seconds: float
    files: set[str]
    told: list[dict[str, Any]]
    result: dict[str, Any]
    log: str

    def is_as(self, other: Ended) -> bool:
        """Return whether files and last parameters are the same."""
        return self.files == other.files and self.told == other.told


def _write_modules(folder: Path, modules: Mapping[str, str]) -> None:
    for name, source in modules.items():
        path = folder.joinpath(*name.split("."))
        is_package = any(other.startswith(f"{name}.") for other in modules)
        write_text(path / "__init__.py" if is_package else path.with_suffix(".py"), source)


class Runner:
    """Runs one script with and without the audit in a temporary folder."""

    def __init__(self, script: Script, checkout: Path, folder: Path) -> None:
        self.script, self.checkout, self.folder = script, checkout.resolve(), folder
        shown = f"checkout = {str(self.checkout)!r}\n"
        _write_modules(folder / "stubs", script.stubs)
        _write_modules(folder / "observer", {"sitecustomize": OBSERVER})
        _write_modules(folder / "made", {"make_data": shown + script.data})
        self.file = self.checkout / script.file
        if script.driver or script.replace:
            (folder / "changed").mkdir()
            text = script.driver or self.file.read_text()
            for old, new in script.replace:
                if old not in text:
                    raise UsageError(f"{script.key}: {old!r} is not in the file")
                text = text.replace(old, new)
            for beside in () if script.driver else self.file.parent.iterdir():
                (folder / "changed" / beside.name).symlink_to(beside)
            self.file = folder / "changed" / ("driver.py" if script.driver else self.file.name)
            self.file.unlink(missing_ok=True)
            self.file.write_text(text)
        (folder / "data").mkdir()
        made = self._run([str(folder / "made" / "make_data.py")], folder / "data")
        if made.returncode:
            raise UsageError(f"{script.key}: data could not be made: {made.stdout[-2000:]}")

    def _run(
        self, command: Sequence[str], cwd: Path, seen: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        folders = [
            self.folder / "stubs",
            *(self.checkout / path for path in self.script.path),
            TABLE.parents[1],
        ]
        folders += [self.folder / "observer"] if seen else []
        found = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
        given = {**OFFLINE, "HF_HOME": str(self.folder / "cache"), "PUBLIC_SCRIPT_SEEN": str(seen)}
        variables = {**os.environ, **given, "PYTHONPATH": os.pathsep.join(filter(None, found))}
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=cwd,
            env={**variables, **self.script.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            log, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks and its loaders too
            log, _ = process.communicate()
            return subprocess.CompletedProcess(command, 124, f"{log}\nstopped after {LIMIT_S} s")
        return subprocess.CompletedProcess(command, process.returncode, log)

    def run(self, name: str, *, audited: bool) -> Ended:
        """Run the script in a fresh copy of its data."""
        cwd, seen = self.folder / name, self.folder / f"seen-{name}"
        shutil.copytree(self.folder / "data", cwd, symlinks=True)
        seen.mkdir()
        before = {path for path in cwd.rglob("*") if path.is_file()}
        named = {"data": str(cwd), "checkout": str(self.checkout)}
        arguments = [
            re.sub(r"\{(data|checkout)\}", lambda m: named[m[1]], a) for a in self.script.arguments
        ]
        audit = [
            "-m",
            "gradcheck_suite",
            "audit",
            "--json",
            str(seen / "audit.json"),
            *self.script.audit,
        ]
        ranks = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={self.script.ranks}",
        ]
        before_it = (ranks if self.script.ranks > 1 else []) + (audit if audited else [])
        command = [*before_it, str(self.file), *arguments]
        start = time.perf_counter()
        ended = self._run(command, cwd, seen)
        seconds = time.perf_counter() - start
        files = {
            path for path in cwd.rglob("*") if path.is_file() and "__pycache__" not in path.parts
        } - before
        names = {re.sub(r"[0-9a-f]{7,}|\d+", "#", str(path.relative_to(cwd))) for path in files}
        told = [json.loads(path.read_text()) for path in sorted(seen.glob("[0-9]*.json"))]
        path = seen / "audit.json"
        result = json.loads(path.read_text())["results"][0] if path.exists() else {}
        return Ended(ended.returncode, seconds, names, told, result, ended.stdout)

    def place(self, shown: str | None) -> str:
        """Return a place without this machine's folders."""
        for folder in (
            self.checkout,
            self.folder / "changed",
            self.folder.resolve() / "changed",
            sys.prefix,
        ):
            shown = re.sub(
                rf"(\.\./)*{re.escape(str(folder).lstrip('/'))}/",
                "",
                (shown or "").replace(" /", " "),
            )
        return shown.lstrip("/") if shown else ""


def _is_at(expected: str, named: str) -> bool:
    """Return whether a place such as `lib.py:7 < train.py:12` has a line of `train.py:10-14`."""
    file, _, lines = expected.partition(":")
    first, _, last = lines.partition("-")
    numbers = re.findall(rf"(?:^|[/ ]){re.escape(file)}:(\d+)", named)
    return any(int(first) <= int(number) <= int(last or first) for number in numbers)


def outcome(script: Script, row: Mapping[str, Any]) -> str:
    """Return whether the audit was right about a script, one of `OUTCOMES`.

    Args:
        script: with the truth.
        row: of the record: `verdict`, `violations`, each a diagnosis and its places, `findings`,
            and `note`, which says what the audit changed.
    """
    if row["note"]:
        return "harmed"
    dark = row["verdict"] == "unjudged" or any(
        UNKNOWN.search(finding) for finding in row["findings"]
    )
    if row["verdict"] == "violated":
        if script.truth != "violated":
            return "wrong"
        named = all(name in script.names for name, *_ in row["violations"])
        at = any(
            _is_at(script.place, place) for _, *places in row["violations"] for place in places
        )
        return "right" if named and (at or not script.place) else "misleading"
    if script.truth == "partial":
        return "right" if dark else "wrong"
    return "partial" if dark else "right" if script.truth == "holds" else "wrong"


def _harm(plain: Ended, audited: Ended, again: Ended | None) -> str:
    """Return what the audit changed, `""` for nothing."""
    if not audited.result:
        return f"no result, exit status {audited.status}: {audited.log[-3000:]}"
    if audited.result["raised"]:
        return f"it raised {audited.result['raised']}"
    if audited.files != plain.files:
        return f"other files: {', '.join(sorted(audited.files ^ plain.files)[:4])}"
    if again is not None and plain.is_as(again) and not plain.is_as(audited):
        return "other parameters"
    return ""


def judged(script: Script, folder: Path) -> dict[str, Any]:
    """Run a script with and without the audit; return the row of the record.

    Args:
        script: the script.
        folder: of the checkouts.
    """
    about = {
        name: getattr(script, name)
        for name in ("repository", "commit", "file", "kind", "framework", "truth")
    }
    row = {"key": script.key, **about, "names": list(script.names), "place": script.place}
    checkout = folder / script.repository
    at = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if at.stdout.strip() != script.commit:
        return {
            **row,
            "outcome": "not run",
            "note": f"no checkout of {script.repository} at {script.commit[:12]}",
        }
    if absent := _absent(script.packages):
        return {
            **row,
            "outcome": "not run",
            "note": f"not installed: pip install {' '.join(absent)}",
        }
    with tempfile.TemporaryDirectory() as temporary:
        try:
            runner = Runner(script, checkout, Path(temporary))
        except UsageError as error:
            return {**row, "outcome": "not run", "note": str(error)}
        plain = runner.run("plain", audited=False)
        if plain.status:
            return {
                **row,
                "outcome": "not run",
                "note": f"exit status {plain.status}: {plain.log[-3000:]}",
            }
        audited = runner.run("audited", audited=True)
        # a script without a seed differs from itself, and one that is compiled from its eager run
        eager, differ = (
            "--eager" in script.audit,
            plain.files == audited.files and plain.told != audited.told,
        )
        again = runner.run("again", audited=False) if differ and not eager else None
        harm = _harm(plain, audited, again)
        result = audited.result or {
            "verdict": "none",
            "violations": [],
            "findings": [],
            "windows": 0,
            "steps": 0,
        }
        named = [
            [runner.place(v[name]) for name in ("where", "backward", "stepped")]
            for v in result["violations"]
        ]
        found = [
            [v["diagnosis"], *places] for v, places in zip(result["violations"], named, strict=True)
        ]
        row |= {
            "verdict": result["verdict"],
            "violations": found,
            "explanations": [v["explanation"] for v in result["violations"]],
            "findings": [runner.place(finding) for finding in result["findings"]],
            "again": result.get("again", {}),
            "judged": result["windows"],
            "steps": plain.told[0]["steps"] if plain.told else result["steps"],
            "parameters": plain.told[0]["parameters"] if plain.told else None,
            "equal": None if eager or (again and not plain.is_as(again)) else plain.is_as(audited),
            "seconds": [round(plain.seconds, 1), round(audited.seconds, 1)],
            "note": harm,
        }
    return {**row, "outcome": outcome(script, row)}


def page_table(reports: Path, table: Path = TABLE) -> Iterator[str]:
    """Yield the lines of the page's table, from the newest record of each run of the table, and
    what they come to.
    """
    keys = {script.key: script.k for script in scripts(table)}
    records = read_records(reports, KINDS[KIND])[0]
    newest = {record.data["key"]: {**record.data, "at": record.commit[:8]} for record in records}
    rows = sorted(
        (newest[key] for key in keys if key in newest), key=lambda row: (row["kind"], row["key"])
    )
    counts = Counter(row["outcome"] for row in rows)
    outcomes = ", ".join(f"{counts[name]} {name}" for name in OUTCOMES if counts[name])
    number = len({row["repository"] for row in rows})
    yield f"{len(rows)} of the table's {len(keys)} runs, from {number} repositories: {outcomes}"
    yield (
        "\n| script | kind | truth | verdict of the audit | it is | parameters | judged, K |"
        " seconds | record |"
    )
    yield "| --- | --- | --- | --- | --- | ---: | ---: | ---: | --- |"
    for row in rows:
        found = (
            "; ".join(f"`{name}` at `{where}`" for name, where, *_ in row["violations"])
            or row["verdict"]
        )
        truth = ", ".join(f"`{name}`" for name in row["names"]) or row["truth"]
        place = f"{row['repository']} at {row['commit'][:8]}, `{row['file']}`"
        size = f"{row['parameters'] or 0:,} | {row['judged']} of {row['steps']}, {keys[row['key']]}"
        seconds = "{:.0f}, {:.0f}".format(*row["seconds"])
        kind = f"{row['kind']}, {row['framework']}"
        yield (
            f"| {place} | {kind} | {truth} | {found} | {row['outcome']} | {size} | {seconds} |"
            f" {row['at']} |"
        )


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "folder", type=Path, nargs="?", help="has a checkout of each repository, as owner/name"
    )
    parser.add_argument(
        "words", nargs="*", help="run the scripts whose key has one of these words; all without one"
    )
    parser.add_argument(
        "--reports", type=Path, default=Path("reports"), metavar="DIR", help="where the records are"
    )
    parser.add_argument(
        "--table", type=Path, default=TABLE, metavar="FILE", help="the runs, as TOML"
    )
    parser.add_argument(
        "--needs",
        action="store_true",
        help="print the packages of the wanted scripts, and run nothing",
    )
    parser.add_argument(
        "--page", type=Path, help="write the table of the records into this page, and run nothing"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the scripts whose key has one of the words, print and record the rows, or write the page."""
    if arguments.page is not None:
        head = arguments.page.read_text(encoding="utf-8").partition(MARK)[0]
        lines = [f"{head}{MARK}", *page_table(arguments.reports, arguments.table), ""]
        write_text(arguments.page, "\n".join(lines))
        return exit_status.HOLDS
    words = arguments.words or [""]
    wanted = [
        script for script in scripts(arguments.table) if any(word in script.key for word in words)
    ]
    if arguments.needs:
        print(*sorted({name for script in wanted for name in script.packages}), sep="\n")
        return exit_status.HOLDS
    if arguments.folder is None:
        raise UsageError("the folder of the checkouts is missing")
    outcomes = set()
    for script in wanted:
        row = judged(script, arguments.folder)
        outcomes.add(row["outcome"])
        if row["outcome"] != "not run":
            about = environment.environment(script.packages)
            append_record(
                arguments.reports,
                KINDS[KIND],
                row,
                environment=about,
                command="python -m studies scripts FOLDER",
            )
        print(f"{row['outcome']:<10} {script.key}  {row['note'] or row['violations']}", flush=True)
    return exit_status.status_of(violated=not outcomes <= {"right", "partial"}, findings=False)
