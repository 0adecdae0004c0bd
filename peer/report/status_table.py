"""The table of `sotto status`, from the answers of the peers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from peer.config.precision_choice import readable_choices
from peer.ops.releases import mixed, versions_of
from peer.ops.standing import OWN_FOLDER
from peer.records import ACCURACY
from peer.report.limit_lines import limits_nearly_reached, limits_reached
from peer.report.numbers import MISSING, percent, significant, size

EXPIRES_SOON_DAYS = 30
"""Certificates with fewer days left than this are named."""


def status_table(answers: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return one row for each peer; figures that a peer did not give are left open. Lines below give the errors of
    silent peers, the reports of others on them, and the neighbours that break the protocol."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="dim")
    table.add_column("peer", no_wrap=True)
    # Only peers of an asynchronous run have a staleness. Eighty columns have no room for both.
    asynchronous = any("staleness" in answer for answer in answers)
    varying = ["staleness"] if asynchronous else ["sent"]
    compared_by = next((str(answer["criterion"]) for answer in answers if "criterion" in answer), ACCURACY.name)
    for heading in ["round", "loss", compared_by, *varying, "socket", "links"]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for answer in answers:
        table.add_row(*_cells(answer, compared_by, asynchronous))
    errors = [Text(f"{_name(answer)}: {answer['error']}", style="red") for answer in answers if "error" in answer]
    # What a peer's own folder says is in its row.
    told = [answer for answer in answers if "note" in answer and answer.get("told_by") != OWN_FOLDER]
    notes = [Text(f"{_name(answer)} {answer['note']}", style="dim") for answer in told]
    return Group(
        table,
        *_private(answers),
        *_precisions(answers),
        *_limited(answers),
        *_diverged(answers),
        *_set_back(answers),
        *notes,
        *errors,
        *_expiring(answers),
        *_offenders(answers),
        *_mixed(answers),
    )


def _mixed(answers: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Return a line that names peers of different releases."""
    sentence = mixed(versions_of(answers))
    return [] if sentence is None else [Text(f"{sentence}: what came with the newer one waits for all", style="yellow")]


def _limited(answers: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield a line for each limit of a device that is reached, or nearly."""
    for answer in answers:
        yield from (Text(f"{_name(answer)} is {each}", style="yellow") for each in limits_reached(answer))
        yield from (Text(f"{_name(answer)}: {each}", style="yellow") for each in limits_nearly_reached(answer))


def _private(answers: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield a line for each peer whose local steps are private."""
    for answer in answers:
        if privacy := answer.get("privacy"):
            limit = "" if privacy["limit"] is None else f" of {privacy['limit']:g}"
            spent = f"{privacy['epsilon']:.2f}{limit} (δ = {privacy['delta']:g})"
            yield Text(f"{_name(answer)} has spent at most ε = {spent}", style="dim")


def _precisions(answers: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Return a line for each peer that chose its precision."""
    chosen = readable_choices({_name(each): each["precision"] for each in answers if each.get("precision")})
    return [Text(f"{name} trains in {choice.sentence}", style="dim") for name, choice in chosen.items()]


def _expiring(answers: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Return a line for each peer whose certificate ends soon."""
    found = [(_name(answer), answer["certificate"]["days_left"]) for answer in answers if answer.get("certificate")]
    return [
        Text(f"{name}: its certificate, or the authority's, is valid for {days} more days; renew it", style="red")
        for name, days in found
        if days < EXPIRES_SOON_DAYS
    ]


def _offenders(answers: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Return a line for each neighbour that an operator should look at, and one with the advice."""
    lines, advice = [], {}
    for answer in answers:
        for each in answer.get("offenders", []):
            offences = f"{each['name']} has broken the protocol {each['offences']} times, most recently: {each['last']}"
            lines.append(Text(f"{_name(answer)}: {offences}", style="red"))
            advice[str(each["name"])] = str(each["advice"])
    return lines + [Text(f"{name}: {sentence}") for name, sentence in advice.items()]


def _cells(answer: Mapping[str, Any], compared_by: str, asynchronous: bool) -> list[RenderableType]:
    round_, rounds = answer.get("round"), answer.get("rounds")
    neighbors, neighbors_up = answer.get("neighbors"), answer.get("neighbors_up")
    return [
        Text(_name(answer)),
        MISSING if round_ is None else f"{round_}" + (f"/{rounds}" if rounds is not None else ""),
        significant(answer.get("loss")),
        percent(answer.get("accuracy"))
        if compared_by == ACCURACY.name
        else significant(answer.get("metrics", {}).get(compared_by)),
        significant(answer.get("staleness")) if asynchronous else size(answer.get("payload_bytes")),
        size(answer.get("socket_bytes")),
        MISSING if neighbors is None else f"{neighbors_up}/{neighbors}",
        Text(str(answer.get("state", MISSING))),
    ]


def _diverged(answers: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Return a line on each peer that is said to have diverged: the first report of it."""
    claims = {str(each["name"]): each for answer in reversed(answers) for each in answer.get("diverged", ())}
    return [
        Text(f"{name} diverged after {each['round']} rounds, {each['told_by']} says: {each['reason']}", style="red")
        for name, each in sorted(claims.items())
    ]


def _set_back(answers: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Return a line on each peer whose state is an old copy."""
    return [Text(f"{_name(each)}: {each['set_back']}", style="red") for each in answers if each.get("set_back")]


def _name(answer: Mapping[str, Any]) -> str:
    return str(answer.get("name", answer.get("index", MISSING)))
