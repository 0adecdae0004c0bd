"""The costs of a model before anyone trains it."""

from __future__ import annotations

from dataclasses import asdict

import click

from peer.cli.app import SottoCommand, print_json
from peer.cli.options import json_option


@click.command(cls=SottoCommand)
@click.argument("model", metavar="MODEL")
@click.option("-b", "--batch", type=click.IntRange(min=1), default=32, help="Samples per batch.")
@click.option("--norm", default="range-evonorm", metavar="NAME", help="Normalization layer, for models that have one.")
@click.option(
    "--size",
    type=click.IntRange(min=8),
    metavar="N",
    help="Image width and height in pixels (default 32), or sentence length in tokens (default 128).",
)
@json_option
def profile(model: str, batch: int, norm: str, size: int | None, as_json: bool) -> None:
    """Measure what training a model costs one peer, in float32, bfloat16 and 8 bits.

    Reports the memory kept for the backward pass, the peak memory and CPU time of a step, the number of multiplications
    by operand type, and the size of a message to one neighbour. Takes half a minute or more, because each precision is
    measured in separate processes.

    \b
    Examples:
      sotto lab profile resnet20
      sotto lab profile mlp --batch 256
      sotto lab profile distilbert --batch 8 --size 64 --json
    """
    from peer.ops.profile import Workload
    from peer.ops.profile import profile as measure

    pieces = 128 if model == "distilbert" else 32
    report = measure(Workload(model, batch, norm, size or pieces))  # type: ignore[arg-type]  # checked there
    if as_json:
        operations = {precision: report.operations(precision) for precision in report.costs}
        print_json({**asdict(report), "operations": operations})
        return
    from rich.console import Console

    from peer.report.profile_table import profile_table

    Console().print(profile_table(report))
