"""The list of mutants (bench/queue_mutants.toml) keeps up with the product, the tests and the page."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bench.queue_mutants import Mutant, all_mutants, table

ROOT = Path(__file__).parents[2]
MUTANTS = all_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{mutant.report}, {mutant.name}" for mutant in MUTANTS])
def test_its_line_is_in_the_product_and_its_tests_exist(mutant: Mutant) -> None:
    assert mutant.old in (ROOT / mutant.path).read_text(encoding="utf-8")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        functions = {
            node.name
            for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        assert name.rpartition("::")[2] in functions, test


def test_the_page_has_its_tables() -> None:
    """`python bench/queue_mutants.py --table` prints them."""
    assert table(MUTANTS).strip() in (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
