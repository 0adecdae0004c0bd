"""The summary of a cluster, from the figures of its peers that are here."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from peer.config.options import Config
from peer.config.precision_choice import FASTEST, PrecisionChoice, readable_choices
from peer.errors import SottoError, StateError
from peer.ops import standing
from peer.ops.collect import Member, criteria_of
from peer.records import ACCURACY, Better
from peer.run.plan import algorithm_spec, build_compressor, build_schedule, describe_compressor
from peer.run.summary import note_precisions, sum_up
from peer.state.metrics import MetricsStore, Summary, measured


def write_cluster_summary(directory: Path, members: Sequence[Member]) -> Summary:
    """Write summary.json from the run's figures here, and return it. Nobody has all models: figures that need them are
    left open. Raises StateError if no peer has recorded a round, or the file cannot be written."""
    config, base = members[0].config, members[0].base
    absent = [sentence for member in members if (sentence := _missing(member))]
    stores = [MetricsStore(file, read_only=True) for member in members if (file := member.metrics) is not None]
    try:
        rounds = [row for store in stores for row in store.rounds()]
        if not rounds:
            nobody = "; ".join(each.partition(". None of")[0] for each in absent) or "no peer has completed a round"
            raise StateError(f"{directory}: there is nothing to report yet: {nobody}")
        compressor = build_compressor(config)
        compresses = algorithm_spec(config).compresses
        widest = max(rounds, key=lambda row: row.messages > 0)
        summary = Summary(
            name=config.run.name,
            algorithm=config.algorithm.name,
            compressor=describe_compressor(compressor) if compresses else "none (full precision)",
            graph=_graph_name(config, base),
            num_peers=len(members),
            rounds=config.run.rounds,
            seed=config.run.seed,
            parameters=widest.values // widest.messages if widest.messages else 0,
            seconds=0.0,
            precision=config.training.precision,
            peer_names=_names(members),
            peer_states={member.name: member.state for member in members},
            missing=absent,
            criteria=_criteria(directory, members),
            collected_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        gone = {member.index for member in members if member.state in ("left", "lost")}
        tables = [(store.rounds(), store.evaluations()) for store in stores]
        tested = {record.peer for record in measured(tables) if record.split == "test" and record.peer >= 0}
        summary.members = sorted(tested - gone)
        if config.training.precision == FASTEST:
            note_precisions(summary, _chosen_precisions(directory, members))
        sum_up(summary, stores)
        summary.seconds = summary.training_seconds
        summary.ended = _ended(members)
        summary.save(directory / "summary.json")
        return summary
    finally:
        for store in stores:
            store.close()


def _missing(member: Member) -> str:
    """Return a sentence about a peer whose figures are not, or not all, here; empty if they are."""
    done = member.recorded
    has = f"The figures of its first {done} rounds are here." if done else "None of its figures are here."
    if member.answer is not None:
        refused = f"{member.name} answers, but does not hand over its figures: {member.problem}. {has}"
        return refused if member.problem is not None else ""
    if member.standing is None:
        why = f" ({member.problem})" if member.problem else ""
        return f"{member.name} cannot be reached{why}. {has}"
    if done >= member.config.run.rounds:
        return ""
    what = f"{member.name} {member.standing.sentence}."
    has_all = member.standing.round == done or member.state in ("joining", "not joined")
    return what if has_all else f"{what} {has}"


def _criteria(directory: Path, members: Sequence[Member]) -> dict[str, Better]:
    """Return the figures of task or script, which is on the devices: as peers say, or said when they were asked before,
    or have left in a state folder here."""
    said = criteria_of(member.answer for member in members if member.answer is not None)
    if said is not None:
        return said
    for member in members:
        with contextlib.suppress(StateError):
            if member.has_kit and (kept := standing.script_criteria(member.config, member.base)) is not None:
                return {criterion.name: criterion.better for criterion in kept}
    try:
        return Summary.load(directory / "summary.json").criteria
    except (OSError, StateError):
        return {ACCURACY.name: ACCURACY.better}


def _chosen_precisions(directory: Path, members: Sequence[Member]) -> dict[str, PrecisionChoice]:
    """Return the precisions that the peers chose, by their present or earlier answers."""
    earlier: Mapping[str, object] = {}
    with contextlib.suppress(OSError, StateError):
        earlier = dict(Summary.load(directory / "summary.json").chosen_precisions)
    return readable_choices(
        {member.name: (member.answer or {}).get("precision") or earlier.get(member.name) for member in members}
    )


def _graph_name(config: Config, base: Path) -> str:
    try:
        return build_schedule(config, base, config.num_members(config.num_listed)).name
    except SottoError:
        return str(config.graph.kind)  # Such as a graph in a file that is on the devices only.


def _names(members: Sequence[Member]) -> list[str]:
    names = [f"peer {index}" for index in range(max(member.index for member in members) + 1)]
    for member in members:
        names[member.index] = member.name
    return names


def _ended(members: Sequence[Member]) -> str:
    """Return how the run ended; that it goes on, or that nobody knows, where that is so."""
    states = [member.state for member in members]
    if all(state in ("completed", *standing.FINAL, "joining", "not joined") for state in states):
        return "completed"
    running = sum(member.answer is not None for member in members) + states.count("connected")
    unknown = states.count("unreachable")
    parts = [f"{running} of {len(members)} peers are running"] if running else []
    if unknown:
        parts.append(f"{unknown} of {len(members)} peers cannot be reached")
    return "; ".join(parts)
