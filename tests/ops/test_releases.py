"""The sentence that names mixed releases."""

from __future__ import annotations

from peer.ops.releases import mixed, versions_of


def test_peers_of_one_release_are_not_worth_a_sentence() -> None:
    assert mixed({}) is None
    assert mixed({"ada": "0.2.0", "ben": "0.2.0"}) is None


def test_the_fewer_are_named() -> None:
    assert mixed({"ada": "0.2.0", "kits": "0.1.0", "ben": "0.2.0"}) == "kits runs 0.1.0, the others 0.2.0"
    assert mixed({"ada": "0.2.0", "kits": "0.1.0"}) == "kits runs 0.1.0, ada 0.2.0"
    four = {"a": "0.1.0", "b": "0.1.0", "c": "0.2.0", "d": "0.2.0", "e": "0.2.0", "f": "0.3.0"}
    assert mixed(four) == "a and b run 0.1.0, f runs 0.3.0, the others 0.2.0"


def test_of_a_peer_that_does_not_answer_the_others_tell() -> None:
    answers = [
        {"name": "ada", "version": "0.2.0", "releases": {"ada": "0.2.0", "ben": "0.1.0", "cleo": None, "dan": "0.2.0"}},
        {"name": "ben", "version": "0.1.0"},
        {"name": "dan", "error": "nobody listens"},
        {"name": "cleo", "version": "0.2.0\n"},
        {"index": 4, "version": "9.9", "releases": "nonsense"},
    ]
    assert versions_of(answers) == {"ada": "0.2.0", "ben": "0.1.0", "dan": "0.2.0", "cleo": "0.2.0 "}
