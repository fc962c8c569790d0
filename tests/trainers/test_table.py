"""The table in the page: latest answers, a row for each version, and nobody's words lost."""

from __future__ import annotations

from gradcheck_suite.case import Case
from gradcheck_suite.journal import append_record
from gradcheck_suite.plan import Plan
from gradcheck_suite.trainers.table import END, START, write_table


def _answer(trainer, version, question, plan=None, diagnosis="mean-of-means", explanation="why: what to do"):
    violation = plan and {"diagnosis": diagnosis, "explanation": explanation, "case": Case("x", plan).to_json()}
    result = {"violation": violation}
    return {"trainer": trainer, "package": "p", "version": version, "question": question, "result": result}


def _page(tmp_path, *answers):
    for answer in answers:
        append_record(tmp_path, "trainer", answer, environment={}, command="")
    return write_table(tmp_path).read_text().splitlines()


def test_a_row_for_each_version_and_the_latest_answer(tmp_path):
    lines = _page(
        tmp_path,
        _answer("accelerate", "1", "equal", Plan((1, 2), 2)),
        _answer("accelerate", "1", "equal"),
        _answer("hf-trainer", "2", "unequal", Plan((1, 2, 1), 2, 2)),
    )
    assert [line for line in lines if line.startswith("|")] == [
        "| trainer | version | equal | unequal |",
        "| --- | --- | --- | --- |",
        "| `hf-trainer` | p 2 |  | **mean-of-means** [1 2 &#124; 1] K=2, 2 epochs |",
        "| `accelerate` | p 1 | holds |  |",
    ]


def test_heads_have_a_table_of_their_own(tmp_path):
    lines = _page(tmp_path, _answer("hf-trainer", "2", "head BertForMaskedLM", Plan((1,), 2)))
    assert "| `BertForMaskedLM` | p 2 | **mean-of-means** [1] K=2 | why |" in lines
    assert not any("trainer |" in line for line in lines)


def test_what_stands_around_the_table_stays(tmp_path):
    (tmp_path / "trainers.md").write_text(f"before\n\n{START}\nlast time\n{END}\n\nafter\n")
    text = "\n".join(_page(tmp_path, _answer("accelerate", "1", "equal")))
    assert text.startswith("before\n\n<!-- table")
    assert text.endswith("<!-- end of table -->\n\nafter")
    assert "last time" not in text
    again = write_table(tmp_path).read_text()
    assert again.rstrip("\n") == text


def test_a_page_without_a_place_for_the_table_gets_it_at_its_end(tmp_path):
    (tmp_path / "trainers.md").write_text("mine\n")
    assert _page(tmp_path, _answer("accelerate", "1", "equal"))[:3] == ["mine", "", START]
