"""The rendered description is that of the docstring."""

from tools import render_wire_docs


def test_the_rendered_description_is_up_to_date() -> None:
    assert render_wire_docs.TARGET.read_text(encoding="utf-8") == render_wire_docs.rendered()
