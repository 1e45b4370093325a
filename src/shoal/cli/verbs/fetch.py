"""`shoal fetch`: download of the files that a run has saved."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.cli import completions
from shoal.cli.options import OutputOptions, with_output_options, with_target_options
from shoal.core.nouns import counted
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.download import DownloadResult, download, run_folder

CHECKPOINTS, REPORTS = "checkpoints", "tensorboard"
SHOWN = 10


@click.command()
@click.argument("run", shell_complete=completions.runs)
@click.argument("directory", default=".", type=click.Path(path_type=Path, file_okay=False))
@click.option("--checkpoints", is_flag=True, help="Also download checkpoints, into a folder of that name.")
@click.option("--tensorboard", is_flag=True, help="Also download TensorBoard event files, into a folder of that name.")
@with_target_options
@with_output_options
def command(
    output: OutputOptions, target: CoordinatorTarget, run: str, directory: Path, checkpoints: bool, tensorboard: bool
) -> None:
    """Download the files that a run has saved.

    Members that do not share a disk with you send what they save to the run's coordinator. This copies it to DIRECTORY,
    on any machine that has the coordinator's URL and a token. Files that are already there are skipped.
    """
    coordinator, view = run_lookup.find_run(target, run)
    results = [download(run_folder(coordinator, view.run), directory)]
    for folder in [name for name, wanted in ((CHECKPOINTS, checkpoints), (REPORTS, tensorboard)) if wanted]:
        result = download(run_folder(coordinator, view.run, folder), directory / folder)
        names = tuple(f"{folder}/{name}" for name in result.names)
        results.append(DownloadResult(names, result.size_bytes, result.present))
    names = tuple(name for result in results for name in result.names)
    total = DownloadResult(
        names, sum(result.size_bytes for result in results), sum(result.present for result in results)
    )
    facts = {"run": view.run, "to": str(directory), "downloaded": names, "present": total.present}
    output.result(facts, lambda: text(total, directory, view.cwd))


def text(result: DownloadResult, directory: Path, cwd: str) -> str:
    """Return what was downloaded, in one line."""
    if not result.names and not result.present:
        where = f"; members on this machine write to {cwd}" if cwd else ""
        return f"nothing to download: the members of this run sent no files to its coordinator{where}"
    present = f"{counted(result.present, 'file')} already up to date" if result.present else ""
    if not result.names:
        return present
    shown = ", ".join(result.names[:SHOWN]) + (", …" if len(result.names) > SHOWN else "")
    return f"downloaded {shown} to {directory}" + (f"; {present}" if present else "")
