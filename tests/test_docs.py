"""What the documents say is what the code does."""

from __future__ import annotations

import re

from busync.protocol.ledger import TABLE
from tests.protocol.protocol_doc import DOCUMENT, generated

DOCS = DOCUMENT.parent


def test_the_tables_of_the_protocol_are_those_of_the_code() -> None:
    text = DOCUMENT.read_text()
    assert text == generated(text), "run python -m tests.protocol.protocol_doc"


def test_every_field_is_explained() -> None:
    rows = re.findall(r"^\| `\w+` \| .* \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) > 50
    assert all(rows)


def test_every_transition_is_there() -> None:
    text = DOCUMENT.read_text()
    assert all(row.meaning in text for row in TABLE)


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
