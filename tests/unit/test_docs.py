"""The pages hold together: links, navigation, the configuration table, the commands they name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from edgellm_producer.cli import COMMANDS as PRODUCER_COMMANDS
from edgellm_worker.cli.commands import COMMANDS as WORKER_COMMANDS
from edgellm_worker.config import Settings, flag_name, variable_name
from tests.support.markdown import PAGES, ROOT, anchors, blocks, links

README = ROOT / "README.md"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@each_page
def test_links_lead_somewhere(page: Path):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


@each_page
def test_python_examples_are_python(page: Path):
    for block in blocks(page):
        if block.language == "python":
            ast.parse(block.text)


@each_page
def test_flags_of_serve_that_pages_show_exist(page: Path):
    """In commands only: `edgellm-worker serve --flag`, `check --flag`."""
    known = {flag_name(field) for field in Settings.model_fields} | {"--config", "--help"}
    for block in blocks(page):
        for command in block.commands:
            if re.search(r"edgellm-worker (serve|check)\b", command):
                assert set(re.findall(r"(?<!\S)--[a-z-]+", command)) <= known, command


@each_page
def test_commands_that_pages_show_exist(page: Path):
    known = {
        "edgellm-worker": {command.name for command in WORKER_COMMANDS},
        "edgellm-producer": {command.name for command in PRODUCER_COMMANDS},
    }
    for block in blocks(page):
        for program, command in re.findall(r"\b(edgellm-(?:worker|producer)) ([a-z]+)", "\n".join(block.commands)):
            assert command in known[program], f"{program} {command}"


def test_navigation_lists_every_page_once():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load(text.split("\nnav:\n")[1])

    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for value in (entry.values() if isinstance(entry, dict) else entry) for page in pages(value)]

    assert sorted(pages(nav)) == sorted(page.name for page in PAGES if page.parent.name == "docs")


def configuration_rows() -> list[tuple[str, str, str]]:
    row = re.compile(r"^\| `(--[a-z-]+)` \| `(EDGELLM_\w+)` \| ([^|]*) \|", re.MULTILINE)
    return [(flag, variable, default.strip()) for flag, variable, default in row.findall(README.read_text())]


def test_configuration_table_says_what_the_worker_does():
    rows = configuration_rows()
    assert len(rows) > 10
    fields = {flag_name(field): (field, info) for field, info in Settings.model_fields.items()}
    for flag, variable, default in rows:
        field, info = fields[flag]
        assert variable == variable_name(field)
        quoted = re.fullmatch(r"`(.*)`", default)
        if quoted is None:
            assert info.default in (None, ()), f"{flag}: the default is {info.default}"
        else:
            plain = info.default.get_secret_value() if hasattr(info.default, "get_secret_value") else info.default
            assert quoted.group(1) == {True: "on", False: "off"}.get(plain, str(plain)), flag


def test_the_producer_example_is_about_ten_lines():
    (example,) = [block for block in blocks(README) if block.language == "python"]
    assert len([line for line in example.text.splitlines() if line.strip()]) <= 12
