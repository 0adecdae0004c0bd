"""The precision that a device chose: as a sentence, as JSON, and what is no choice."""

from __future__ import annotations

import json

import pytest

from peer.config.precision_choice import PrecisionChoice

CHOICE = PrecisionChoice("int8", {"float32": 0.0052, "bfloat16": 0.0026, "int8": 0.002})


def test_the_sentence_says_by_how_much_it_is_faster() -> None:
    assert CHOICE.sentence == "int8: 2 ms a step, bfloat16 1.30×, float32 2.60×"
    assert PrecisionChoice("float32").sentence == "float32"


def test_json_holds_all_of_it() -> None:
    assert PrecisionChoice.of_document(json.loads(json.dumps(CHOICE.document()))) == CHOICE
    assert PrecisionChoice.of_document({"precision": "int8"}) == PrecisionChoice("int8")


@pytest.mark.parametrize(
    "tree",
    [
        None,
        [],
        {},
        {"precision": "fastest"},
        {"precision": ["int8"]},
        {"precision": "int8", "step_s": [0.1]},
        {"precision": "int8", "step_s": {"int4": 0.1}},
        {"precision": "int8", "step_s": {"int8": "soon"}},
        {"precision": "int8", "step_s": {"int8": 0.0}},
        {"precision": "int8", "step_s": {"int8": float("nan")}},
        {"precision": "int8", "step_s": {"int8": float("inf")}},
    ],
)
def test_what_is_no_choice_is_refused(tree: object) -> None:
    with pytest.raises(ValueError, match="PrecisionChoice"):
        PrecisionChoice.of_document(tree)
