"""docs/from_dtensor.md has the tables of torch's names, as they are today."""

from __future__ import annotations

from tests.sharding.compat import surface_dtensor, surface_fsdp
from tests.sharding.compat.surface_page import BEGIN, END, PAGE, tables, written


def test_the_page_has_todays_tables() -> None:
    page = PAGE.read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    assert written(page) == page, "run: python -m tests.sharding.compat.surface_page"


def test_every_key_is_in_the_tables() -> None:
    text = tables()
    for key in (*surface_dtensor.STATUS, *surface_fsdp.STATUS):
        name, _, parameter = key.rstrip(")").partition("(")
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` ")]
        assert not parameter or f"`{parameter}`" in row
