from __future__ import annotations

import pytest

from peer.errors import SecurityError
from peer.net.admission import CONTROL_VERBS, Admission
from peer.net.rpc import Caller
from peer.net.security.certificates import Role
from peer.net.security.credentials import Access, TokenAccess
from tests.net.transport_peers import NAMES, authority, credentials, passive

TOKEN = TokenAccess("correct-horse-battery-staple-0123")
OPEN = {"status", "revoke", "probe"}


def caller(address: str = "ipv4:192.0.2.7:4711", name: str | None = None, role: Role = Role.PEER) -> Caller:
    return Caller(address, (), None if name is None else authority().issue(name, role=role).certificate)


def admission(access: Access | None) -> Admission:
    rules = Admission(access, me=0, name="ada", neighbors={1: passive(1)}, hears_newcomers=False)
    rules.members.update(NAMES)
    return rules


def allowed(rules: Admission, who: Caller) -> set[str]:
    """Return the control calls that a caller may make."""
    verbs = set()
    for verb in CONTROL_VERBS:
        try:
            rules.check_control(verb, who)
        except SecurityError:
            continue
        verbs.add(verb)
    return verbs


def test_without_certificates_only_this_machine_controls_a_peer() -> None:
    rules = admission(None)
    assert allowed(rules, caller("ipv4:127.0.0.1:4711")) == set(CONTROL_VERBS)
    assert allowed(rules, caller("ipv6:[::1]:4711")) == set(CONTROL_VERBS)
    assert allowed(rules, caller("ipv4:192.0.2.7:4711")) == OPEN
    assert allowed(rules, caller("unix:")) == OPEN


def test_with_certificates_an_operator_and_the_peer_itself_control_it() -> None:
    rules = admission(credentials("ada"))
    assert allowed(rules, caller(name="olga", role=Role.OPERATOR)) == set(CONTROL_VERBS)
    assert allowed(rules, caller(name="ada")) == set(CONTROL_VERBS)
    assert allowed(rules, caller(name="ben")) == OPEN
    assert allowed(rules, caller("ipv4:127.0.0.1:4711")) == set(), "no certificate, no call"


def test_a_token_is_asked_for_in_every_service() -> None:
    rules = admission(TOKEN)
    shows = Caller("ipv4:192.0.2.7:4711", TOKEN.metadata(), None)
    assert allowed(rules, shows) == set(CONTROL_VERBS)
    rules.check_stream(shows)
    assert rules.relay_user(shows, "ben") == "ben"
    assert allowed(rules, caller()) == set()
    with pytest.raises(SecurityError, match="does not show this run's token"):
        rules.check_stream(caller())
    with pytest.raises(SecurityError, match="does not show this run's token"):
        rules.relay_user(caller(), "ben")


def test_streams_are_counted_by_name_or_by_address() -> None:
    assert admission(credentials("ada")).account(caller(name="ben")) == "ben"
    assert admission(None).account(caller("ipv6:[2001:db8::1]:4711")) == "2001:db8::1"
    assert admission(None).account(caller("unix:")) == "unix:"
