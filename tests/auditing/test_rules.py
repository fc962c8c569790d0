"""Every rule of the audit's tables fires on some script, no rule outranks one that outranks it, and
where two faults hold it is said which of them stands.
"""

from __future__ import annotations

import pytest

from gradcheck_suite.auditing.scales import SCALE_RULES
from gradcheck_suite.auditing.step_rules import PER_PASS, STEP_RULES
from gradcheck_suite.auditing.sums import RULES
from gradcheck_suite.auditing.weighing import OF_LOSSES

TABLES = {
    "step": STEP_RULES,
    "sum": RULES,
    "losses": OF_LOSSES,
    "coefficient": SCALE_RULES,
}
EVERY = [rule for table in TABLES.values() for rule in table] + [PER_PASS]


@pytest.mark.parametrize("table", TABLES)
def test_a_rule_outranks_rules_that_follow_it_so_that_there_is_no_circle(table):
    names = [rule.name for rule in TABLES[table]]
    assert len({*names}) == len(names)
    for at, rule in enumerate(TABLES[table]):
        assert {*rule.before} <= {*names[at + 1 :]}, rule.name
