"""Commands after a run: export the model, render the report, compare runs; and replay a scenario file."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peer.cli.app import SottoCommand, print_json, tell
from peer.cli.options import json_option, newest_run, output_option
from peer.errors import ConfigError, SottoError, StateError
from peer.files import instead_of

if TYPE_CHECKING:
    from peer.report.comparison import Contender
    from peer.state.metrics import Summary

TOLERANCE = 1e-9
"""Allowed difference of a replayed trajectory from the expected one: rounding of float64 stays far below."""


@click.command(cls=SottoCommand)
@click.argument("sources", metavar="[FOLDER...]", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "-p",
    "--peer",
    "peer_index",
    type=click.IntRange(min=0),
    metavar="K",
    help="Export the model of peer K of a run folder instead of the average.",
)
@output_option(
    "File to write, or folder with --format huggingface; by default model.safetensors or model.", metavar="PATH"
)
@click.option(
    "--format",
    "layout",
    type=click.Choice(["file", "huggingface"]),
    default="file",
    help="A safetensors file, or a folder as on the Hugging Face Hub: with config.json and README.md.",
)
@click.option(
    "--statistics",
    metavar="PEER|mean|data",
    help="Running statistics of norms and other buffers of an average: those of a peer, by name, the mean of all (the"
    " default), or measured anew on training samples that are here.",
)
@click.option("--int8", is_flag=True, help="Write 8-bit weights, for inference in 8-bit arithmetic.")
@click.option("--torch-export", "program", is_flag=True, help="Also write a program for torch.export.load (.pt2).")
@click.option("--onnx", is_flag=True, help="Also write the model in ONNX (.onnx).")
@click.option(
    "--onnx-int8", is_flag=True, help="Also write the model in ONNX with 8-bit weights and activations (.int8.onnx)."
)
@click.option("--no-card", is_flag=True, help="Do not write the model card (.card.md).")
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
@json_option
def export(
    sources: tuple[Path, ...],
    peer_index: int | None,
    output: Path | None,
    layout: str,
    statistics: str | None,
    int8: bool,
    program: bool,
    onnx: bool,
    onnx_int8: bool,
    no_card: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write a trained model to a safetensors file.

    FOLDER is a run folder (exports the average of all peers, or one peer with --peer) or the folder of one peer; by
    default that of this device or, without one, the newest run in ./runs. The folder of one peer exports the average
    that all formed after the last round; before, or with --peer, the newest checkpoint of this peer. Of several folders
    of peers the average is exported. Neither the data nor the code of the task or training script is needed. The model
    is de-biased: push-sum values are divided by their weight. A strict load_state_dict of the model takes the file. A
    model card beside it says how the model was trained. A model above 5 GB is written in shards of at most that, with
    an index that names them.

    Buffers, such as the running statistics of norms, and private parameters are each peer's own. An average takes the
    mean, unless --statistics names a peer; for private parameters it has to be given.

    With --int8 the file holds 8-bit codes and one scale for each matrix, and the ranges of activations measured on
    2,048 training samples. `sottovoce.load_int8` reads such a file. For 8 bits without this package, use --onnx-int8,
    which works with any model. Both print the accuracy of the exported model and of the same weights in float32. ONNX
    needs `pip install 'sottovoce[onnx]'`.

    With --format huggingface, the folder of a DistilBERT or GPT is one that `transformers` loads. Other models need the
    code of their task, which config.json names.

    \b
    Examples:
      sotto export
      sotto export runs/digits -o digits.safetensors
      sotto export runs/digits --int8 -o small.safetensors
      sotto export runs/digits --onnx --torch-export -o digits.safetensors
      sotto export runs/digits --peer 3 -o third.safetensors
      sotto export kits/peer-0
      sotto export kits/peer-0 kits/peer-2 --statistics peer-0
      sotto export runs/reviews --format huggingface -o reviews
    """
    sources = sources or (newest_run(or_device=True),)
    for each in sources:
        if not each.exists():
            raise StateError(f"{each}: no such folder{instead_of(each)}")
    from peer.terminal import telling
    from peer.train.startup import quick_imports

    with quick_imports():
        from peer.ops.export import Beside, export_model
    hub = layout == "huggingface"
    if hub and int8:
        raise click.UsageError("a folder for the Hugging Face Hub holds float32 weights; leave out --int8")
    output = output or Path("model" if hub else "model.safetensors")
    if hub:
        output /= "model.safetensors"
    beside = Beside(program=program, onnx=onnx, onnx_int8=onnx_int8, card=not no_card, hub=hub)
    with telling(lambda: "reads and writes the model", partial(click.echo, err=True)):
        exported = export_model(
            sources, output, peer_index=peer_index, statistics=statistics, int8=int8, beside=beside, force=force
        )
    if rest := exported.rounds_to_come:
        click.echo(f"rounds to come: {rest}; export again after the last for the final model (--force)", err=True)
    if as_json:
        size = sum(file.stat().st_size for file in exported.weights)
        row = {"file": str(exported.files[0]), "bytes": size, "accuracy": exported.accuracy, "round": exported.round}
        row |= {"files": [str(file) for file in exported.files], "figures": exported.figures}
        print_json({**row, "rounds_to_come": exported.rounds_to_come, "peers": list(exported.peers)})
        return
    click.echo(f"wrote {exported.files[0]}: {exported.description}")
    for file in exported.files[1:]:
        click.echo(f"wrote {file}")
    for precision, where in (("int8", "in 8 bits"), ("onnx-int8", "in 8 bits with ONNX Runtime")):
        for name, value in exported.figures.get(precision, {}).items():
            full = exported.figures["float32"][name]
            eight, full_text = (f"{100 * v:.2f} %" if name == "accuracy" else f"{v:.4g}" for v in (value, full))
            label = "test accuracy" if name == "accuracy" else name
            click.echo(f"{label}: {eight} {where}, {full_text} in float32")


@click.command(cls=SottoCommand)
@click.argument("directories", metavar="[DIR...]", nargs=-1, type=click.Path(path_type=Path))
@output_option("File to write; by default DIR/report.html.")
@click.option("--offline", is_flag=True, help="Of a cluster, ask no peer: use what is in the folder.")
@json_option
def report(directories: tuple[Path, ...], output: Path | None, offline: bool, as_json: bool) -> None:
    """Write the report of a run folder, or of a cluster; by default of the newest run in ./runs.

    Several folders are compared, as by `sotto lab compare`.

    The report is one self-contained HTML file with learning curves, bytes of each link, the graph and the
    configuration. A run that is still in progress or was interrupted is shown up to its last record.

    DIR may be a cluster folder (`sotto init cluster`). The running peers are then asked for their figures, which needs
    the operator's certificate and is kept in DIR/collected; of other peers, the state folder counts where it was copied
    back into DIR/peer-K. The command also writes DIR/summary.json and names what is missing. Accuracies on hold-outs
    stay on the devices, and the averaged model is not evaluated, since no machine has all models.

    \b
    Examples:
      sotto report
      sotto report runs/digits
      sotto report runs/digits -o /tmp/digits.html
      sotto report runs/a runs/b
      sotto report kits
    """
    if len(directories) > 1:
        click.get_current_context().invoke(compare, directories=directories, output=output, as_json=as_json)
        return
    directory = directories[0] if directories else newest_run()
    from peer.ops.collect import is_cluster
    from peer.report.run_page import write_report

    summary = _collect(directory, offline) if is_cluster(directory) else None
    written = write_report(directory, output)
    if as_json:
        print_json({"report": str(written)} | ({} if summary is None else {"summary": summary.document()}))
        return
    if summary is not None:
        from rich.console import Console

        from peer.report.summary_table import summary_table

        Console().print(summary_table(summary))
    click.echo(f"wrote {written}")


def _collect(directory: Path, offline: bool) -> Summary:
    """Bring together what the peers of a cluster have measured, and draw their graph."""
    from peer.cli.training_run import draw_graph
    from peer.ops.cluster_summary import write_cluster_summary
    from peer.ops.collect import collect

    members = collect(directory, ask=not offline)
    summary = write_cluster_summary(directory, members)
    first = members[0]
    with suppress(ConfigError):  # The file of the graph may be on the devices only.
        draw_graph(first.config, first.base, first.config.num_members(first.config.num_listed), directory)
    return summary


@click.command(cls=SottoCommand)
@click.argument("scenario", metavar="FILE", type=click.Path(path_type=Path))
@json_option
def replay(scenario: Path, as_json: bool) -> None:
    """Replay a scenario file through algorithm, compressor and encoded bytes, in float64.

    --json prints the trajectory {"x": …, "z": …, "u": …} of every node, before round 0 and after each round; without
    --json only the last models are shown. If the file contains an expected trajectory, the result is compared with it,
    and the exit code is 1 if they differ by more than 1e-9.

    \b
    Examples:
      sotto lab replay scenario.json
      sotto lab replay scenario.json --json > trajectory.json
    """
    from peer.simulate import replay as scenarios

    content = scenarios.read_scenario(scenario)
    result = scenarios.replay(content)
    difference = None if content.expect is None else scenarios.largest_difference(result, content.expect)
    if as_json:
        print_json(result, indent=None)
    else:
        steps = f"{len(result['x']) - 1} {'events' if content.events else 'rounds'}"
        click.echo(f"{content.algorithm}: {len(content.curvature)} nodes, {steps}")
        for node, values in enumerate(result.get("z", result["x"])[-1]):
            shown = "  ".join(f"{value:.6g}" for value in values[:6])
            click.echo(f"  node {node}  {shown}{'  …' if len(values) > 6 else ''}")
        if difference is not None:
            click.echo(f"largest difference from the expected trajectory: {difference:.3g}")
    if difference is not None and difference > TOLERANCE:
        raise SottoError(
            f"{scenario}: the result differs from the expected trajectory by {difference:.3g}, more than {TOLERANCE:g}"
        )


directories_argument = click.argument(
    "directories", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path)
)


@click.command(cls=SottoCommand)
@directories_argument
@output_option("Also write the comparison as an HTML page.")
@json_option
def compare(directories: tuple[Path, ...], output: Path | None, as_json: bool) -> None:
    """Compare runs: their results, their curves, and what differs in their configurations.

    Curves lie over each other by round, by second and by byte. Runs that differ in their seed alone become one line
    with their mean and range. A run is a folder of `sotto up` or `sotto simulate`, or a cluster folder that
    `sotto report` has collected.

    \b
    Examples:
      sotto lab compare runs/digits runs/digits-2
      sotto lab compare runs/scsp-* runs/moniqua-* -o comparison.html
      sotto lab compare runs/slow runs/fast --json
    """
    from peer.report.comparison import contenders
    from peer.report.run_data import load_run

    found = contenders([load_run(directory) for directory in directories])
    if output is not None:
        from peer.report.compare_page import compare_page
        from peer.report.page import write_page

        write_page(output, compare_page(found))
    if as_json:
        print_json(_as_json(found, output))
        return
    from rich.console import Console

    from peer.report.compare_table import compare_table

    Console().print(compare_table(found))
    if output is not None:
        click.echo(f"wrote {output}")


def _as_json(found: list[Contender], output: Path | None) -> dict[str, Any]:
    from peer.report.comparison import differences, target

    reached = target(found)
    names = [each.name for each in found]
    return {
        "contenders": [
            {
                "name": each.name,
                "runs": [str(run.directory) for run in each.runs],
                "summaries": [None if run.summary is None else run.summary.document() for run in each.runs],
            }
            for each in found
        ],
        "target": None if reached is None else asdict(reached),
        "differences": {key: dict(zip(names, values, strict=True)) for key, values in differences(found)},
        "page": None if output is None else str(output),
    }


@click.command(cls=SottoCommand)
@directories_argument
@output_option("File to write: NAME.csv, or NAME.parquet (needs the extra parquet).", required=True)
@click.option(
    "-t",
    "--table",
    type=click.Choice(["rounds", "evaluations", "links", "consensus"]),
    default="rounds",
    help="Which figures: of each round of each peer, of evaluations, of links, or of all models together.",
)
@json_option
def metrics(directories: tuple[Path, ...], output: Path, table: str, as_json: bool) -> None:
    """Write the metrics of runs to one CSV or Parquet file.

    Each row has the name of its run and peer in front. Bytes are in bytes, times in seconds, accuracies from 0 to 1.

    \b
    Examples:
      sotto lab metrics runs/digits -o rounds.csv
      sotto lab metrics runs/* --table evaluations -o evaluations.parquet
    """
    from peer.report.metrics_file import write_metrics
    from peer.report.run_data import load_run

    rows = write_metrics([load_run(directory) for directory in directories], table, output)
    tell(as_json, {"file": str(output), "table": table, "rows": rows}, [f"wrote {output}: {rows:,} rows"])
