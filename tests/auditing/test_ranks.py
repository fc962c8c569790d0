"""The audit of two ranks: sound scripts hold over all ranks, faulty ones are named, a dead rank is
reported.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest
import torch

import gradcheck_suite
from gradcheck_suite.auditing import context
from gradcheck_suite.auditing.context import (
    End,
    RankFile,
    Ranks,
    RankWriter,
    died_before,
    gather_ranks,
    read_ranks,
)
from gradcheck_suite.auditing.events import Gap
from gradcheck_suite.auditing.terms import Reader
from tests.auditing.running import GLOO_AT_EXIT, audited_on_two_ranks, free_port, python_path
from tests.auditing.scripts import ON_TWO_RANKS


def _expect(name, result, ended):
    script = ON_TWO_RANKS[name]
    assert result["verdict"] == script.verdict, result
    status = ("holds", "violated", "unjudged").index(script.verdict)
    assert [status for _, status in ended] == [status, 0], ended
    if status == 2:
        assert script.said[0] in result["unjudged"]
    else:
        assert tuple(one["diagnosis"] for one in result["violations"]) == script.said, result
        assert result["windows"] == result["steps"]
    assert all(ended[0][0].count(f": {one['diagnosis']}: ") == 1 for one in result["violations"]), (
        ended
    )
    assert ended[1][0].count("ranks") == 0  # rank 0 alone prints the result


SIZES = ((4, 2), (3, 1))
"""The sizes of the micro-batches of each rank."""


def _of_two_ranks(
    monkeypatch,
    weight=lambda rank, n: 0.2,
    *,
    reduce=lambda _, mean, own: mean,
    apart=(),
    data=(0, 1),
):
    """Train one window of two ranks, one after the other, and return rank 0's result.

    Args:
        monkeypatch: pytest's.
        weight: of the sum of a micro-batch's losses, by its rank and its size.
        reduce: makes of the mean of a parameter's gradients, and of the rank's own one, what the
            rank steps on.
        apart: names of parameters that the second rank has by itself.
        data: the rank whose data each one sees.
    """
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", str(os.getpid()))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    generator = torch.Generator().manual_seed(0)
    batches = [
        [
            (torch.randn(n, 5, generator=generator), torch.randint(0, 3, (n,), generator=generator))
            for n in sizes
        ]
        for sizes in SIZES
    ]
    torch.manual_seed(0)
    models = [torch.nn.Linear(5, 3) for _ in SIZES]
    models[1].load_state_dict(
        {k: v for k, v in models[0].state_dict().items() if k not in apart}, strict=False
    )

    def backward(rank):
        models[rank].zero_grad()
        for x, y in batches[data[rank]]:
            loss = torch.nn.functional.cross_entropy(models[rank](x), y, reduction="sum")
            (loss * weight(rank, len(y))).backward()

    audits = []
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        optimizer = torch.optim.SGD(models[rank].parameters(), lr=0.0)
        backward(1 - rank)
        with gradcheck_suite.audit() as audit:
            backward(rank)
            for (name, own), other in zip(
                models[rank].named_parameters(), models[1 - rank].parameters(), strict=True
            ):
                own.grad = reduce(name, (own.grad + other.grad) / 2, own.grad)
            optimizer.step()
        audits.append(audit)
    assert audits[0].result.unjudged == "rank 1 of 2: rank 0 judges the steps of all ranks"
    return audits[1].result


def test_the_lines_of_all_ranks_are_judged_together(monkeypatch):
    sound = _of_two_ranks(monkeypatch)
    assert (sound.verdict, sound.windows, sound.ranks) == ("holds", 1, 2), sound
    alike = _of_two_ranks(monkeypatch, lambda rank, n: 2 / 12, data=(0, 0))
    assert [
        str(r.findings).count("the same gradient arrived on all ranks") for r in (sound, alike)
    ] == [0, 1], alike
    for weight, share, diagnosis, part in (
        (
            lambda rank, n: 1 / 10,
            1,
            "wrong-scale",
            "1/2 of what it should: each loss is divided by the count of all ranks",
        ),
        (
            lambda rank, n: 1,
            0.1,
            "wrong-scale",
            "1/2 of what it should: each loss is divided by the count of all ranks",
        ),
        (
            lambda rank, n: 1 / sum(SIZES[rank]),
            1,
            "mean-of-means",
            "each rank's mean has weight 1/2",
        ),
    ):
        violation = _of_two_ranks(
            monkeypatch, weight, reduce=lambda _, mean, own, share=share: mean * share
        ).violation
        assert violation.diagnosis == diagnosis, violation
        assert part in violation.explanation
        assert [(row.rank, row.count) for row in violation.weights] == [
            (0, 4),
            (1, 3),
            (0, 2),
            (1, 1),
        ]
    alone = _of_two_ranks(
        monkeypatch, lambda rank, n: 1 / sum(SIZES[rank]), reduce=lambda _, mean, own: own
    )
    assert alone.verdict == "holds", alone
    assert any("each rank was judged by itself" in finding for finding in alone.findings)


def test_what_a_rank_that_trains_alone_shows_is_said_of_it_and_what_all_show_once(monkeypatch):
    for faulty, said, shown in (
        ((1,), "on rank 1: each micro-batch's", 1),
        ((0, 1), "each micro-batch's", 0),
    ):
        result = _of_two_ranks(
            monkeypatch,
            lambda rank, n, faulty=faulty: 1 / (2 * n) if rank in faulty else 1 / sum(SIZES[rank]),
            reduce=lambda _, mean, own: own,
        )
        assert [one.diagnosis for one in result.violations] == ["mean-of-means"], result
        assert result.violation.explanation.startswith(said)
        assert [(row.rank, row.count) for row in result.violation.weights] == [
            (shown, n) for n in SIZES[shown]
        ]


@pytest.mark.parametrize(
    ("compress", "finding"),
    [
        (lambda mean: mean.bfloat16().float(), False),
        (lambda mean: mean if mean.dim() == 1 else mean.clamp(-0.01, 0.01), True),
        (lambda mean: mean * (1 + 0.1 * torch.linspace(-1, 1, mean.numel()).view_as(mean)), True),
    ],
)
def test_what_ranks_compress_and_reduce_is_their_sum(monkeypatch, compress, finding):
    result = _of_two_ranks(monkeypatch, reduce=lambda name, mean, own: compress(mean))
    assert (result.verdict, result.windows) == ("holds", 1), result
    assert any("`.grad` is edited" in said for said in result.findings) is finding


def test_parameters_whose_gradients_alone_are_not_reduced_are_named(monkeypatch):
    def reduce(name, mean, own):
        return own if name == "bias" else mean

    violation = _of_two_ranks(monkeypatch, reduce=reduce).violation
    assert violation.diagnosis == "not-reduced", violation
    assert violation.explanation.startswith("in bias: only each rank's own gradient")
    # experts that each rank has for itself have other values there
    result = _of_two_ranks(monkeypatch, reduce=reduce, apart=("bias",))
    assert (result.verdict, result.windows) == ("holds", 1), result
    assert any(
        said.startswith("bias began with other values on each rank") for said in result.findings
    ), result


def test_an_instrument_that_failed_on_another_rank_judges_nothing(monkeypatch):
    def numbers(reader):
        if os.environ["RANK"] == "1":
            raise OSError("torn")
        for found in reader.found:
            found.measure()
        return reader.found

    monkeypatch.setattr(Reader, "measured", numbers)
    result = _of_two_ranks(monkeypatch)
    assert result.unjudged.endswith(", on rank 1)"), result


def _place(monkeypatch, tmp_path, rank, parent, **others):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getppid", lambda: parent)
    return Ranks.of({"RANK": str(rank), "WORLD_SIZE": "2", **others})


PORT = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_what_an_earlier_run_on_the_same_port_left_is_not_read(monkeypatch, tmp_path):
    left = _place(monkeypatch, tmp_path, 1, 101, **PORT)
    RankWriter(left).end(End("of the earlier run"))
    os.utime(left.own, (1e9, 1e9))
    now = _place(monkeypatch, tmp_path, 0, 200, **PORT)
    RankWriter(now).end(End())
    assert [file.end for file in gather_ranks(now, 0.0)] == [End(), None]
    # a rank that the same process has started is of this run, also one that had ended before
    beside = _place(monkeypatch, tmp_path, 1, 200, **PORT)
    RankWriter(beside).end(End("of this run"))
    os.utime(beside.own, (1e9, 1e9))
    assert [file.end and file.end.raised for file in gather_ranks(now, 0.0)] == ["", "of this run"]


def test_without_a_port_ranks_of_one_launcher_find_each_other(monkeypatch, tmp_path):
    folders = [
        _place(monkeypatch, tmp_path, rank, parent).folder
        for rank, parent in ((0, 7), (1, 7), (1, 8))
    ]
    assert folders[0] == folders[1] != folders[2]


def test_a_rank_that_died_is_known_on_its_own_machine_alone(monkeypatch, tmp_path):
    first, second = (_place(monkeypatch, tmp_path, rank, 100, **PORT) for rank in range(2))
    RankWriter(first).end(End())
    running = RankWriter(second)
    assert read_ranks(first, 1).is_open
    assert not died_before(second)
    for host, known in ((socket.gethostname(), False), ("another", None)):
        writer = replace(read_ranks(first, 1).writer, pid=2**22 + 1, host=host)
        assert RankFile(1, writer=writer).is_open is known
    running.end(End())


def test_a_rank_that_waits_reads_each_entry_once(monkeypatch, tmp_path):
    first, second = (_place(monkeypatch, tmp_path, rank, 100, **PORT) for rank in range(2))
    RankWriter(first).end(End())
    running = RankWriter(second)
    running.write(*(Gap(range(n, n + 1)) for n in range(500)))
    last = pickle.dumps(Gap(range(500, 501)))
    loads, looks, load = [], itertools.count(1), pickle.load

    def counted(file):
        loads.append(load(file))
        return loads[-1]

    def slept(_):
        # an entry that is half written is read when it is whole
        look = next(looks)
        if look == 5:
            running._file.write(last[:7])
            running._file.flush()
        elif look == 6:
            running._file.write(last[7:])
            running._file.flush()
        elif look == 10:
            running.end(End())

    monkeypatch.setattr(pickle, "load", counted)
    monkeypatch.setattr(context.time, "sleep", slept)
    files = gather_ranks(first)
    assert [len(file.events) for file in files] == [0, 501]
    assert [event.steps.start for event in files[1].events] == [*range(501)]
    # of the two files their writers and ends, and each event; `path` looks at the own writer
    assert len([one for one in loads if isinstance(one, Gap)]) == 501


def test_a_rank_that_is_told_to_end_waits_no_longer_than_its_launcher_does(monkeypatch, tmp_path):
    first, second = (_place(monkeypatch, tmp_path, rank, 100, **PORT) for rank in range(2))
    RankWriter(first).end(End())
    running = RankWriter(second)  # this process, which lives on
    now = [0.0]
    monkeypatch.setattr(context.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(context.time, "sleep", lambda seconds: now.append(now.pop() + 1.0))
    files = gather_ranks(first, hurries=lambda: 3.0 if now[0] > 3.0 else None)
    assert [file.end for file in files] == [End(), None]
    assert now[0] == pytest.approx(3.0 + context.GRACE, abs=1.5)
    running.end(End())


@pytest.mark.full
def test_ranks_that_shells_of_their_own_start_are_judged_together(tmp_path, scripts):
    result, ended = audited_on_two_ranks(
        scripts / "ranks" / "faulty_gathered_count.py", tmp_path / "r.json", own_parents=True
    )
    _expect("faulty_gathered_count", result, ended)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *zip(
            sorted(ON_TWO_RANKS.keys() - {"dying", "faulty_each_rank_alone"}),
            itertools.cycle(("float32", "float64")),
        )
    ],
)
def test_a_script_of_two_ranks_gets_the_verdict_that_is_true_of_it(name, dtype, tmp_path, scripts):
    """Each script in one of the dtypes: every run starts two processes, which takes ten seconds of
    computing.
    """
    _expect(
        name, *audited_on_two_ranks(scripts / "ranks" / f"{name}.py", tmp_path / "r.json", dtype)
    )


@pytest.mark.full
def test_every_fault_of_ranks_that_train_alone_is_shown_in_full(tmp_path, scripts):
    result, ended = audited_on_two_ranks(
        scripts / "ranks" / "faulty_each_rank_alone.py", tmp_path / "r.json"
    )
    _expect("faulty_each_rank_alone", result, ended)
    said = [one["explanation"] for one in result["violations"]]
    assert [one.startswith(f"on rank {rank}: ") for rank, one in enumerate(said)] == [
        True,
        True,
        False,
    ], said
    assert [ended[0][0].count(f": {one['diagnosis']}: ") for one in result["violations"]] == [
        1,
        1,
        1,
    ], ended


@pytest.mark.full
def test_the_file_through_which_ranks_meet_is_gone_after_the_run(tmp_path, scripts):
    """Its store removes it when the process group and the wrapped model are gone: an audit holds
    neither.
    """
    text = (scripts / "ranks" / "sound_counted.py").read_text()
    script, store = scripts / "ranks" / "of_a_file.py", tmp_path / "store"
    script.write_text(
        "import os, toy\nimport torch.distributed as dist\ntoy.model_of_rank = lambda: (\n    dist.init_process_group"
        f"('gloo', init_method='file://{store}', rank=int(os.environ['RANK']), world_size=2) or toy.classifier())\n"
        + text
    )
    result, _ = audited_on_two_ranks(script, tmp_path / "r.json")
    assert result["verdict"] == "holds", result
    assert not store.exists()


@pytest.mark.full
def test_torchrun_starts_audits(tmp_path, scripts):
    path = tmp_path / "r.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        free_port(),
    ]
    command += [
        "-m",
        "gradcheck_suite",
        "audit",
        "--json",
        str(path),
        str(scripts / "ranks" / "sound_counted.py"),
    ]
    environment = {**os.environ, "PYTHONPATH": python_path(GLOO_AT_EXIT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert "3 steps judged of 3 over 2 ranks" in done.stderr
    assert json.loads(path.read_text())["results"][0]["verdict"] == "holds"


@pytest.mark.full
def test_a_rank_that_died_is_said_to_have_died(tmp_path, scripts):
    result, ended = audited_on_two_ranks(scripts / "ranks" / "dying.py", tmp_path / "r.json")
    assert ended[1][1] == -9
    assert any("rank 1 has not ended: it died" in finding for finding in result["findings"]), result
    assert result["violation"]["diagnosis"] == "not-reduced"
    assert result["windows"] == 2
