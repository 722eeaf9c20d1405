"""Every field report has its test, every such test its mutant, and every mutant fits the code as it is."""

from __future__ import annotations

import re

import pytest

from tests.support import mutants
from tests.support.mutants import Case, Mutant

ENTRIES = (  # noqa: SIM905
    "01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 17 18 20 21 23 24 25 26 27 28 34 35 36 39 47 48 49 50 51 55 58 60 62 "
    "63 64 65 67 68 69 70 71 72 73 76 77 78 79 80 81 83 84 85 87 88 89 90 92 93 94 95 96 97 98 99 101 103 104 105"
).split()
LEDGER = "tests/protocol/test_ledger.py"
REPORTS = "tests/field_reports/"


@pytest.mark.parametrize("file", mutants.files())
def test_every_mutant_fits_and_every_test_has_one(file: str) -> None:
    tests, cases = mutants.tests_and_mutants(file)
    for case in cases:
        case.mutant.apply((mutants.ROOT / case.mutant.path).read_text())
        assert case.mutant.path.startswith("busync/"), case
        assert case.mutant.why, case
        assert "\n" not in case.mutant.why, case
    named = {case.test for case in cases}
    assert named <= set(tests), f"there is no {sorted(named - set(tests))}"
    assert named == set(tests) or not file.startswith(REPORTS), f"no mutant for {sorted(set(tests) - named)}"


def test_every_field_report_has_a_test() -> None:
    files = [file for file in mutants.files() if file.startswith(REPORTS)]
    tests = [test for file in files for test in mutants.tests_and_mutants(file)[0]]
    odd = [test for test in tests if not re.fullmatch(r"test_b\d\d+_[a-z0-9_]+", test)]
    assert not odd
    assert len(tests) == len(set(tests)), "a name occurs twice"
    found = {test.split("_")[1].removeprefix("b") for test in tests}
    assert sorted(found, key=int) == sorted(ENTRIES, key=int)


def test_a_mutant_has_to_fit_the_file() -> None:
    mutant = Mutant("busync/ids.py", "one", "two", "nothing")
    assert mutant.apply("x = one\n") == "x = two\n"
    with pytest.raises(ValueError, match="2 times"):
        mutant.apply("x = one + one\n")
    with pytest.raises(ValueError, match="stays as it is"):
        Mutant("busync/ids.py", "one", "one", "nothing").apply("x = one\n")
    with pytest.raises(ValueError, match="is no Python"):
        Mutant("busync/ids.py", "one", "(", "nothing").apply("x = one\n")


def test_the_runner_tells_a_killed_mutant_from_one_that_survives(capsys: pytest.CaptureFixture[str]) -> None:
    test = "test_a_pin_keeps_a_retired_segment"
    harmful = Mutant("busync/protocol/ledger.py", "entry.pins -= 1", "entry.pins -= 0", "a pin never ends")
    harmless = Mutant("busync/protocol/ledger.py", '"""It has read it."""', '"""Done."""', "nothing")
    missing = Case(LEDGER, "test_that_is_not_there", harmless)
    killed, survived = mutants.run([Case(LEDGER, test, harmful), Case(LEDGER, test, harmless)])
    assert (killed.outcome, survived.outcome) == ("killed", "survived")
    assert (killed.good, survived.good) == (True, False)
    assert "a pin never ends" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="without a mutant"):
        mutants.run([missing])
