"""`shoal fetch`: bring what a run has saved."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.cli.options import OutputOptions, with_frame, with_place
from shoal.launch import download, run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.download import DownloadResult

CHECKPOINTS, REPORTS = "checkpoints", "tensorboard"
SHOWN = 10


@click.command()
@click.argument("run")
@click.argument("directory", default=".", type=click.Path(path_type=Path, file_okay=False))
@click.option("--checkpoints", is_flag=True, help="Its checkpoints too, in a folder of that name.")
@click.option("--tensorboard", is_flag=True, help="Its event files for TensorBoard too, in a folder of that name.")
@with_place
@with_frame
def command(
    frame: OutputOptions, place: CoordinatorTarget, run: str, directory: Path, checkpoints: bool, tensorboard: bool
) -> None:
    """Bring what a run has saved.

    Members on machines that do not share a disk with yours send what they save to the run's coordinator. This brings
    it to DIRECTORY, from any machine with the coordinator's URL and a token; what is there already is left alone.
    """
    coordinator, view = run_lookup.find_run(place, run)
    found = [download.bring(download.source_of(coordinator, view.run), directory)]
    for folder in [name for name, asked in ((CHECKPOINTS, checkpoints), (REPORTS, tensorboard)) if asked]:
        brought = download.bring(download.source_of(coordinator, view.run, folder), directory / folder)
        found.append(
            DownloadResult(tuple(f"{folder}/{name}" for name in brought.names), brought.size_bytes, brought.present)
        )
    names = tuple(name for one in found for name in one.names)
    whole = DownloadResult(names, sum(one.size_bytes for one in found), sum(one.present for one in found))
    answer = {"run": view.run, "to": str(directory), "brought": names, "present": whole.present}
    frame.answer(answer, lambda: told(whole, directory))


def told(brought: DownloadResult, directory: Path) -> str:
    """What was brought, for people."""
    if not brought.names and not brought.present:
        return "the run has nothing at its coordinator that members saved"
    there = f"{brought.present} files were there already" if brought.present else ""
    if not brought.names:
        return there
    shown = ", ".join(brought.names[:SHOWN]) + (", …" if len(brought.names) > SHOWN else "")
    return f"brought {shown} to {directory}" + (f"; {there}" if there else "")
