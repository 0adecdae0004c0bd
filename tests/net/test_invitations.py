"""The text of an invitation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peer.errors import SecurityError
from peer.net.security.invitations import Invitation, read_invitation

INVITATION = Invitation(
    "digits",
    ("10.0.0.1:7710", "[fd00::1]:7710", "home.example:7711"),
    bytes(range(32)),
    b"8 bytes.",
    b"S" * 16,
    1 << 31,
)


def test_a_text_says_what_it_was_made_of() -> None:
    text = INVITATION.text()
    assert read_invitation(text) == INVITATION
    assert read_invitation(f"  {text[:70]}\n{text[70:].upper()}\r\n") == INVITATION, "mail breaks lines, people shout"
    assert len(text) < 260
    assert "SSSS" not in repr(INVITATION)


def test_every_truncation_and_every_changed_character_is_noticed() -> None:
    text = INVITATION.text()
    start = len("sotto-invitation-1-")
    for length in range(len(text)):
        with pytest.raises(SecurityError, match=r"no invitation|incomplete or was changed"):
            read_invitation(text[:length])
    for place in range(start, len(text) - 1):
        changed = text[:place] + ("b" if text[place] == "a" else "a") + text[place + 1 :]
        with pytest.raises(SecurityError, match="incomplete or was changed"):
            read_invitation(changed)
    with pytest.raises(SecurityError, match="incomplete or was changed"):
        read_invitation(text + text[start:])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "paste the line"),
        ("hello", "paste the line"),
        ("sotto-invitation-1-", "paste the line"),
        ("x" * 5000, "none is so long"),
        (INVITATION.text().replace("-1-", "-2-"), "has version 2, and this release reads 1; install the release"),
    ],
)
def test_another_text_is_a_sentence_with_what_to_do(text: str, words: str) -> None:
    with pytest.raises(SecurityError, match=words):
        read_invitation(text)


@pytest.mark.parametrize(
    "changed",
    [
        {"run": "../../etc"},
        {"run": ""},
        {"addresses": ()},
        {"addresses": ("10.0.0.1:7710",) * 4},
        {"addresses": ("no port",)},
        {"addresses": ("0.0.0.0:7710",)},
        {"authority": b"short"},
        {"secret": b"longer than sixteen bytes"},
        {"expires": (1 << 64) - 1},
    ],
)
def test_a_right_checksum_makes_no_wrong_content_right(changed: dict[str, Any]) -> None:
    with pytest.raises(SecurityError, match="what none can say"):
        read_invitation(replace(INVITATION, **changed).text())


def test_a_proof_is_of_one_side_one_connection_and_one_content() -> None:
    shown, nonces = b"certificate", (b"1" * 32, b"2" * 32)
    proof = INVITATION.proof("device", shown, nonces, b"request")
    assert INVITATION.is_proven(proof, "device", shown, nonces, b"request")
    others = [
        INVITATION.proof("operator", shown, nonces, b"request"),
        INVITATION.proof("device", b"another", nonces, b"request"),
        INVITATION.proof("device", shown, nonces[::-1], b"request"),
        INVITATION.proof("device", shown, nonces, b"another"),
        replace(INVITATION, run="other").proof("device", shown, nonces, b"request"),
        replace(INVITATION, authority=bytes(32)).proof("device", shown, nonces, b"request"),
        replace(INVITATION, secret=bytes(16)).proof("device", shown, nonces, b"request"),
    ]
    assert len({proof, *others}) == len(others) + 1
    assert not any(INVITATION.is_proven(each, "device", shown, nonces, b"request") for each in (*others, "", "ü"))
