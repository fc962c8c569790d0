"""Sections on what the suite was tried on: public scripts, architectures, findings in trainers and
frameworks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gradcheck_suite.core.records import Data, Record
from gradcheck_suite.core.text import counted
from gradcheck_suite.page.content import Document, Figure, Section, sources, table
from gradcheck_suite.page.reading import Facts, Part
from studies.report.charts import against_bound_plot

FINDINGS_FOLDER = "findings"
"""The folder of what people wrote down about trainers and frameworks, one Markdown file each."""


def _public_scripts(newest: list[Record]) -> Section:
    rows = [record.data for record in newest]
    number = Counter(row["outcome"] for row in rows)
    shown = ("repository", "file", "kind", "framework", "truth", "verdict", "outcome")
    return Section(
        text=(
            f"Of {counted(len(rows), 'run')} of public training scripts, each at a stated commit"
            " and with a truth that was worked out before by reading, the audit judged"
            f" {number['right']} rightly; the others: "
            + (", ".join(f"{n} {how}" for how, n in number.items() if how != "right") or "none")
            + ".",
        ),
        tables=(
            table("Public scripts", [{name: row.get(name) for name in shown} for row in rows]),
        ),
    )


def _public_script_facts(data: Data) -> Facts:
    return {data["key"]: f"{data.get('verdict', 'no verdict')}, {data['outcome']}"}


PUBLIC_SCRIPTS = Part(
    "public-scripts", "verification", "Public training scripts under the audit", "public-script",
    _public_scripts, _public_script_facts,
)  # fmt: skip


# Which real architectures the bridge carries over to JAX, and how well torch and JAX agree there.


NARROW_SHOWN = 3
MOVED = ("tests/bridge/test_architectures.py", "studies/tests/architectures")
"""Where the tests that make these records stood, and where they stand."""


def _bridge(newest: list[Record]) -> Section:
    refused = [record.data for record in newest if "refused" in record.data]
    carried = [record.data for record in newest if "refused" not in record.data]
    plain = [data for data in carried if not data["widened"]]
    wide = {(d["architecture"], d["version"]): d["gradient_error"] for d in carried if d["widened"]}
    architectures = table(
        "Architectures",
        [
            {
                "architecture": d["architecture"], "version": f"{d['package']} {d['version']}",
                "operations": d.get("operations"), "loss off by": d.get("loss_error"),
                "gradient off by": d.get("gradient_error"), "bound": d.get("allowed"),
                "with float32 parts in float64": None
                if "refused" in d
                else wide.get((d["architecture"], d["version"])), "computed in float32 by the model": _narrow(d),
            }
            for d in (*plain, *refused)
        ],
        "Gradients' differences are those of the worst entry, over the largest entry of all gradients. Where a "
        "model computes parts in float32 whatever its own dtype, the bound is two float32 roundoffs for each "
        "such operation, and the model is held to 1e-10 with these parts in float64.",
    )  # fmt: skip
    agree = sum(data["gradient_error"] <= data["allowed"] for data in plain)
    return Section(
        text=(
            (
                "`verify --problem` asks JAX about your own model, too: torch exports the loss,"
                " the suite translates it to JAX operation by operation, and JAX differentiates"
                " all of it but custom functions whose own backward is accepted or found wrong."
                f" Tried on {len(plain) + len(refused)} architectures of transformers and torch.nn,"
                f" small, with random weights, in float64: {agree} gradients agree with torch's"
                f" within the bound, and {len(refused)} are refused by name."
            ),
        ),
        figures=(_agreement(plain),),
        tables=(architectures,),
        # a command that somebody can run today; the record keeps what was run
        sources=sources(
            replace(record, command=record.command.replace(*MOVED)) for record in newest
        ),
    )


def _narrow(data: Data) -> str | None:
    if "refused" in data:
        return f"refused: {data['refused']}"
    narrow = data["narrow"]
    more = f" and {len(narrow) - NARROW_SHOWN} more" if narrow[NARROW_SHOWN:] else ""
    return ", ".join(narrow[:NARROW_SHOWN]) + more or None


def _agreement(datas: Sequence[Data]) -> Figure:
    rows = [
        {
            "name": f"{data['architecture']} {data['version']}",
            "error": float(data["gradient_error"]),
            "bound": float(data["allowed"]),
        }
        for data in datas
    ]
    return Figure(
        "architectures",
        against_bound_plot(rows, "difference of the gradients"),
        "Difference between torch's and JAX's gradient for each architecture, beside its bound: "
        + "; ".join(f"{row['name']} {row['error']:.1e} of {row['bound']:.0e}" for row in rows),
        "Points: difference between torch's and JAX's gradient. Ticks: the bound.",
        in_story=True,
    )


def _bridge_facts(data: Data) -> Facts:
    agrees = data["gradient_error"] <= data["allowed"]
    widened = " widened" if data["widened"] else ""
    return {f"{data['architecture']} {data['version']}{widened}": "agrees" if agrees else "differs"}


BRIDGE = Part(
    "bridge", "trust", "Your own model in JAX", "bridge", _bridge, _bridge_facts,
    "No architecture has been carried over yet: run "
    "`pytest studies/tests/architectures --full --bridge-records reports`, which needs transformers.",
)  # fmt: skip


# Findings in trainers and frameworks that people wrote down.


def _findings(texts: list[Record]) -> Section:
    heads = [record.data["text"].lstrip().partition("\n") for record in texts]
    text = (
        f"{len(heads)} findings, each with a script that shows it without the suite, its cause and"
        " a fix."
    )
    documents = tuple(Document(head.lstrip("# ").strip(), rest.strip()) for head, _, rest in heads)
    return Section(text=(text,), documents=documents)


FINDINGS = Part("findings", "trainers", "Findings", FINDINGS_FOLDER, _findings)


def written_down(reports: Path) -> dict[str, list[Record]]:
    """Return the findings of a reports folder, as records that no command made."""
    texts = (
        path.read_text(encoding="utf-8")
        for path in sorted((reports / FINDINGS_FOLDER).glob("*/*.md"))
    )
    return {FINDINGS_FOLDER: [Record(FINDINGS_FOLDER, {"text": text}) for text in texts]}


# What ran on a GPU.


def _on_gpus(newest: list[Record]) -> Section | None:
    shown = [record for record in newest if record.data["device"] == "cuda"]
    cards = ", ".join(sorted({str(record.data["gpu"]) for record in shown}))
    rows = [
        {
            "part": data["part"], "what": data["task"], "result": data["result"],
            "as expected": "yes" if data["as_expected"] else "no", "seconds": round(data["seconds"]),
        }
        for data in (record.data for record in shown)
    ]  # fmt: skip
    return (
        Section(tables=(table(f"What ran on {cards}", rows),), sources=sources(shown))
        if shown
        else None
    )


def _gpu_facts(data: Data) -> Facts:
    return {f"{data['part']} {data['task']} on {data['device']}": data["result"]}


ON_GPUS = Part("gpu", "verification", "On a GPU", "gpu", _on_gpus, _gpu_facts)
