"""One self-contained page about a run.

A figure that was not recorded is left open; a section whose data is missing says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from peer.records import ACCURACY, Criterion
from peer.report import blocks
from peer.report.blocks import MOST_ROWS, Block, Drawing, Missing, Remark, Section, Table
from peer.report.curves import MOST_PEERS, figure_charts, gone_peers, health_charts, loss_charts
from peer.report.line_chart import Chart
from peer.report.numbers import MISSING, count, difference, duration, figure, percent, significant, size, times, when
from peer.report.page import document, write_page
from peer.report.run_data import RunData, load_run, mean
from peer.report.summary_table import MAX_PEERS, chosen_precisions, precision_name
from peer.report.whole_models import WHOLE_MODELS, equal_interval, reduction, references
from peer.state.metrics import EvaluationRecord, LinkRecord, Summary


def write_report(directory: Path, output: Path | None = None) -> Path:
    """Write the report of a run folder, by default as report.html in it; return its path.

    Raises StateError if the folder is no run folder or the file cannot be written.
    """
    output = output or directory / "report.html"
    write_page(output, render(load_run(directory)))
    return output


def render(data: RunData) -> str:
    """Return the page."""
    losses = _charts(data, loss_charts(data), "Means of consecutive rounds: single batches are noise.")
    sections = (
        Section("figures", "Key figures", _key_figures(data)),
        *(_figure_section(data, criterion) for criterion in _criteria(data)),
        Section("loss", "Training loss", losses),
        Section("classes", "Worst peer, class by class", _classes(data)),
        Section("peers", "Peers", _peers(data)),
        Section("gossip", "Health of the gossip", _charts(data, health_charts(data))),
        Section("time", "Where the time goes", _time(data)),
        Section("traffic", "Traffic", _traffic(data)),
        Section("links", "Links", _links(data)),
        Section("graph", "Graph", [_graph(data)]),
        Section("configuration", "Configuration", [_configuration(data)]),
        Section("machine", "Machine", _machine(data)),
    )
    return document(data.name, kicker="Run", heading=data.name, header=_header(data), sections=sections)


def _criteria(data: RunData) -> list[Criterion]:
    return data.summary.all_criteria if data.summary is not None else [ACCURACY]


def _figure_section(data: RunData, criterion: Criterion) -> Section:
    anchor = re.sub(r"[^a-z0-9]+", "-", criterion.name.lower()).strip("-") or "metric"
    heading = criterion.name[:1].upper() + criterion.name[1:]
    note = "Every peer's own model on the common test set."
    if criterion != ACCURACY:
        anchor, note = f"metric-{anchor}", f"{note} {criterion.better.capitalize()} values are better."
    return Section(anchor, heading, _charts(data, figure_charts(data, criterion), note))


def _header(data: RunData) -> list[Block]:
    summary = data.summary
    found: list[Block] = []
    if summary is not None:
        facts = [
            summary.algorithm,
            summary.compressor,
            summary.graph,
            f"{summary.num_peers} peers",
            f"{count(summary.rounds)} rounds",
            f"trained in {precision_name(summary)}",
            f"seed {summary.seed}",
            *([when(summary.started_at)] if summary.started_at else []),
            *([f"collected {when(summary.collected_at)}"] if summary.collected_at else []),
        ]
        found.append(blocks.Facts(facts))
        if 0 < len(chosen := chosen_precisions(summary)) <= MAX_PEERS:
            found.append(blocks.Facts(chosen))
        found += map(blocks.Command, summary.commands)
        if summary.ended not in ("", "completed"):
            ended = summary.ended.capitalize() if summary.collected_at else f"Ended early: {summary.ended}"
            found.append(blocks.Banner(ended))
    return [*found, *map(blocks.Banner, data.notes)]


def _key_figures(data: RunData) -> list[Block]:
    summary = data.summary
    if summary is None:
        return [Missing("They are written when a run ends.")]
    if summary.socket_bytes is not None:
        sent = ("On the network", *_saved(summary, summary.socket_bytes, "with TLS, HTTP/2 and control"))
    else:
        sent = ("Messages", *_saved(summary, summary.frame_bytes, "with headers and checksums"))
    cards = [
        *(card for criterion in summary.all_criteria for card in _figure_cards(summary, criterion)),
        ("Model updates", *_saved(summary, summary.payload_bytes, "their numbers alone")),
        sent,
        ("Bits a parameter", significant(summary.bits_per_parameter), "of each model update; 32 in a whole model"),
        _time_card(summary),
    ]
    return [blocks.Cards(cards)]


def _figure_cards(summary: Summary, criterion: Criterion) -> list[tuple[str, str, str]]:
    single, worst = summary.single_process(criterion), summary.worst(criterion)
    against = "on the common test set"
    if single is not None and worst is not None:
        against = (
            f"{difference(criterion, worst - single)} against one process on all data in full precision"
            f" ({figure(criterion, single)})"
        )
    name = "" if criterion == ACCURACY else f", {criterion.name}"
    averaged = summary.averaged(criterion)
    of_all = (f"Averaged model{name}", figure(criterion, averaged), "the mean of all peers' models")
    if averaged is None and len(summary.of_peers(criterion)) > 1:
        of_all = (f"Mean of devices{name}", figure(criterion, summary.mean(criterion)), "each with its own model")
    return [(f"Worst peer{name}", figure(criterion, worst), against), of_all]


def _saved(summary: Summary, num_bytes: int, what: str) -> tuple[str, str]:
    """Return the figure and the note of a card for a number of bytes, as a reduction where there is one."""
    saved = reduction(summary, num_bytes)
    if saved is None:
        return size(num_bytes), what
    return times(saved), f"saved against {WHOLE_MODELS}: {size(num_bytes)}, {what}"


def _time_card(summary: Summary) -> tuple[str, str, str]:
    """Return the time that the curves show, and that on the clock of this machine."""
    whole = duration(summary.seconds)
    if not summary.training_seconds:
        return "Time", whole, ""
    per_round = f"{1000 * summary.seconds_per_round:.1f} ms a round"
    trained = duration(summary.training_seconds)
    if summary.simulated:
        return "Time to simulate", whole, f"virtual time, which the curves show: {trained}, {per_round}"
    if summary.collected_at:
        return "Training time", trained, f"{per_round}; of the peer that took longest, stops included"
    if len(summary.commands) > 1:
        return "Training time", trained, f"{per_round}; the last of {len(summary.commands)} commands took {whole}"
    return "Training time", trained, f"{per_round}; {whole} with the start of the peers and the end"


def _charts(data: RunData, charts: Sequence[Chart], note: str = "") -> list[Block]:
    drawn = [chart for chart in charts if chart.plot is not None]
    said = [chart.note for chart in charts if chart.note]
    if not drawn and not said:
        return [Missing("Not recorded in this run.")]
    sentences = [*([note] if note else []), *said]
    if len(data.peers) > MOST_PEERS:
        sentences.append(f"{MOST_PEERS} of {len(data.peers)} peers are drawn one by one.")
    return [*([Remark(" ".join(sentences))] if sentences else []), blocks.Charts(drawn)]


def _classes(data: RunData) -> list[Block]:
    worst = _worst_evaluation(data)
    if worst is None or len(worst.total) < 2 or ACCURACY not in _criteria(data):
        return [Missing("No accuracy by class was recorded.")]
    rows = []
    for index, (right, total) in enumerate(zip(worst.correct, worst.total, strict=True)):
        share = right / total if total else None
        bars = [] if share is None else [blocks.Bar(100 * share)]
        rows.append(blocks.BarRow(str(index), bars, [percent(share)], f"{right} of {total}"))
    heading = f"{data.peer_name(worst.peer)} after {count(worst.round)} rounds: {percent(worst.accuracy)} in all."
    return [Remark(heading), blocks.Bars("Accuracy by class", rows)]


def _worst_evaluation(data: RunData) -> EvaluationRecord | None:
    criterion = _criteria(data)[0]
    rows = [row for row in _newest(data, "test").values() if row.peer not in gone_peers(data)]
    known = [(value, row) for row in rows if (value := row.figure(criterion)) is not None]
    return min(known, key=lambda each: criterion.rank(each[0]))[1] if known else None


def _newest(data: RunData, split: str) -> dict[int, EvaluationRecord]:
    """Return the last evaluation of every peer."""
    return {row.peer: row for row in data.evaluations if row.split == split and row.peer >= 0}


def _peers(data: RunData) -> list[Block]:
    if not data.peers:
        return [Missing("No peer has recorded a round.")]
    test, holdout = _newest(data, "test"), _newest(data, "holdout")
    criteria = _criteria(data)
    heads = ["peer", "rounds", "loss", *(f"test {c.name.removeprefix('test ')}" for c in criteria)]
    heads += [f"hold-out {c.name.removeprefix('test ')}" for c in criteria] if holdout else []
    states = data.summary.peer_states if data.summary is not None else {}
    heads += ["state"] if states else []
    heads += ["model updates", "messages", "bits a parameter", "late neighbours", "repairs", "u"]
    # A cluster also has peers without collected metrics.
    names = data.summary.peer_names if data.summary is not None else []
    listed = sorted({*data.peers, *(index for index, name in enumerate(names) if name in states)})
    rows = []
    for peer in listed[:MOST_ROWS]:
        records = data.rounds_of(peer)
        losses = [record.loss for record in records[-50:] if record.loss is not None]
        payload, values = sum(r.payload_bytes for r in records), sum(r.values for r in records)
        cells = [
            data.peer_name(peer),
            count(records[-1].round + 1) if records else MISSING,
            significant(mean(losses)) if losses else MISSING,
            *(figure(c, test[peer].figure(c)) if peer in test else MISSING for c in criteria),
        ]
        if holdout:
            cells += [figure(c, holdout[peer].figure(c)) if peer in holdout else MISSING for c in criteria]
        if states:
            cells.append(states.get(data.peer_name(peer), MISSING))
        cells += [
            size(payload if records else None),
            size(sum(r.frame_bytes for r in records) if records else None),
            significant(8 * payload / values) if values else MISSING,
            count(sum(r.late for r in records) if records else None),
            count(records[-1].repairs) if records else MISSING,
            significant(records[-1].push_weight) if records else MISSING,
        ]
        rows.append(cells)
    return [Table(heads, rows, "Peers"), *blocks.left_out(len(listed))]


def _time(data: RunData) -> list[Block]:
    found, widest = [], 0.0
    for peer in data.peers[:MOST_ROWS]:
        records = data.rounds_of(peer)
        if records:
            parts = [1000 * mean([getattr(r, name) for r in records]) for name in _STAGES]
            widest = max(widest, sum(parts))
            found.append((peer, parts, 1000 * mean([r.cpu_s for r in records])))
    if not widest:
        return [Missing("No times were recorded.")]
    rows = []
    for peer, parts, cpu in found:
        bars = [
            blocks.Bar(100 * part / widest, style, f"{label} {part:.2f} ms")
            for part, (label, style) in zip(parts, _STAGES.values(), strict=True)
        ]
        rows.append(blocks.BarRow(data.peer_name(peer), bars, [f"{part:.2f}" for part in (*parts, cpu)]))
    note = (
        "Means over all rounds, in milliseconds. CPU is that of the whole process; in a simulation all peers share it, "
        "and waiting is virtual."
    )
    legend = dict(_STAGES.values())
    times = blocks.Bars("Times of each peer", rows, heads=["peer", *legend, "CPU"], legend=legend)
    return [Remark(note), times, *blocks.left_out(len(data.peers))]


_STAGES = {"train_s": ("local step", "train"), "gossip_s": ("gossip", "gossip"), "wait_s": ("waiting", "wait")}
"""Field of a round's row → its name, and its colour."""


def _traffic(data: RunData) -> list[Block]:
    summary = data.summary
    if summary is None:
        return [Missing("Totals are written when a run ends.")]
    stages = (
        ("Model updates", "their numbers alone", summary.payload_bytes),
        ("Messages", "with header and checksum", summary.frame_bytes),
        ("Protobuf", "messages in chunks, receipts, heartbeats", summary.protobuf_bytes or None),
        ("Socket", "with HTTP/2 and TLS, as the kernel counted", summary.socket_bytes),
        ("Packets", "with 40 bytes of IP and TCP header for each segment", summary.packet_bytes),
    )
    rows = [
        [name, what, size(num_bytes), times(reduction(summary, num_bytes))]
        for name, what, num_bytes in stages
        if num_bytes is not None
    ]
    heads = ["stage", "what it counts", "all peers, whole run", "saved against whole models"]
    title = "Other ways to train this model"
    found: list[Block] = [Table(heads, rows, "Bytes sent", text_columns=2)]
    if (bound := summary.entropy_bits_per_parameter) is not None:
        found.append(Remark(f"A model update could take {significant(bound)} bits a parameter (its entropy) at least."))
    return [*found, blocks.Heading(title), *_other_ways(summary, title)]


def _other_ways(summary: Summary, title: str) -> list[Block]:
    payload = summary.payload_bytes
    rows = [
        [each.name, each.what, size(each.num_bytes), times(each.num_bytes / payload) if payload else MISSING]
        for each in references(summary)
    ]
    interval = equal_interval(summary)
    sentence = (
        "Bytes of the numbers alone, computed for as many rounds and peers; their accuracy is not known from this run."
    )
    if interval is not None:
        sentence += f" Local SGD sends as much as this run with a mean every {significant(interval)} rounds."
    heads = ["way", "what is sent", "all peers, whole run", "times this run"]
    return [Remark(sentence), Table(heads, rows, title, text_columns=2)]


def _links(data: RunData) -> list[Block]:
    if not data.links:
        return [Missing("No links were recorded.")]
    parameters = data.summary.parameters if data.summary is not None else 0
    bound = {
        peer: sum(r.entropy_bits for r in records) / sum(r.values for r in records)
        for peer in data.peers
        if (records := [r for r in data.rounds_of(peer) if r.entropy_bits and r.values])
    }
    heads = ["from", "to", "messages", "model updates", "with headers", "protobuf", "socket", "packets"]
    heads += ["bits a parameter", "entropy bound", "resent", "reconnects"]
    rows = [
        [
            data.peer_name(link.peer),
            data.peer_name(link.neighbor),
            count(link.frames),
            size(link.payload_bytes or None),
            size(link.frame_bytes or None),
            size(link.protobuf_bytes or None),
            size(link.socket_bytes),
            size(link.packet_bytes),
            _link_bits(link, parameters),
            significant(bound.get(link.peer)),
            count(link.resent_frames),
            count(link.reconnects),
        ]
        for link in data.links[:MOST_ROWS]
    ]
    note = (
        "Totals of each direction, as its sender counted them. The entropy bound is that of all messages of the sender."
    )
    # A simulation has no sockets: columns that nobody filled are left out.
    kept = [column for column in range(len(heads)) if any(row[column] != MISSING for row in rows)]
    heads, rows = [heads[column] for column in kept], [[row[column] for column in kept] for row in rows]
    return [Remark(note), Table(heads, rows, "Links", text_columns=2), *blocks.left_out(len(data.links))]


def _link_bits(link: LinkRecord, parameters: int) -> str:
    if not link.payload_bytes or not link.frames or not parameters:
        return MISSING
    return significant(8 * link.payload_bytes / (link.frames * parameters))


def _graph(data: RunData) -> Block:
    if data.graph_svg is None:
        return Missing("The run folder holds no graph.svg.")
    name = data.summary.graph if data.summary is not None else "the run"
    drawing = inline_drawing(data.graph_svg, f"Graph of {name}: arrows from sender to receiver")
    return drawing or Missing("The graph.svg of the run folder is no drawing of a graph.")


def _configuration(data: RunData) -> Block:
    if data.config is None:
        return Missing("The run folder holds no config.toml.")
    # The comments explain every key; here only the settings are of interest.
    settings = "\n".join(line for line in data.config.splitlines() if line.strip() and not line.startswith("#"))
    return blocks.Settings("All settings as they were resolved", re.sub(r"\n(?=\[)", "\n\n", settings))


def _machine(data: RunData) -> list[Block]:
    if data.summary is None or not data.summary.machine:
        return [Missing("The machine was not recorded.")]
    return [Remark("Bit identity is promised for equal machines."), blocks.Definitions(data.summary.machine)]


_NAMESPACE = "{http://www.w3.org/2000/svg}"
_SHAPES = ("g", "path", "polygon", "circle", "text")
_ATTRIBUTES = frozenset(
    ("class", "transform", "d", "points", "cx", "cy", "r", "x", "y", "stroke-width", "font-size")
)  # fmt: skip


_DEPTH = 8
"""Deepest nesting of shapes; a drawing of a graph has two levels."""


def inline_drawing(svg: bytes, label: str) -> Drawing | None:
    """Return the permitted parts of a drawing of `graph_view.svg`; None if the bytes are no such drawing.

    Only shapes and text pass, with attributes that place them; style sheets, scripts, links and images do not.
    """
    try:
        root = ElementTree.fromstring(svg)
        width, height = (float(root.get(side, "")) for side in ("width", "height"))
    except (ElementTree.ParseError, ValueError):
        return None
    if root.tag != f"{_NAMESPACE}svg":
        return None
    kept = ElementTree.Element("svg")
    _copy(root, kept, _DEPTH)
    return Drawing(label, width, height, kept)


def _copy(source: ElementTree.Element, target: ElementTree.Element, depth: int) -> None:
    for child in source if depth else ():
        shape = str(child.tag).removeprefix(_NAMESPACE)
        if shape in _SHAPES:
            attributes = {name: value for name, value in child.attrib.items() if name in _ATTRIBUTES}
            added = ElementTree.SubElement(target, shape, attributes)
            added.text = child.text
            _copy(child, added, depth - 1)
