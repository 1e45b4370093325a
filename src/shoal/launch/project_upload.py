"""Upload of the user's project to the coordinator, from where agents on other machines fetch it.

A project is a manifest of names and SHA-256 hashes, and a blob for each hash. The client sends only the blobs that the
coordinator lacks, so a second run of the same project uploads next to nothing. The project is every file that neither
Git nor .shoalignore ignores. Tokens never travel: SHOAL_HOME, every directory that looks like a coordinator's, the
token file in use and the one that SHOAL_TOKEN_FILE names are left out wherever they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from shoal.launch.api_client import ApiClient
from shoal.launch.coordinator_target import home, token_file_of_environment
from shoal.pack import project
from shoal.store import journal

MB = 1 << 20


def upload_project(client: ApiClient, root: Path | None, packed: Mapping[str, Path], token_file: str = "") -> str:
    """Upload the files that the coordinator lacks; return the hash under which agents find the project."""
    manifest, contents = project.hash_files(files_to_send(root, packed, token_file))
    digest, data = project.encode(manifest)
    blobs: Mapping[str, Path | bytes] = {**contents, digest: data}
    client.send(blobs)
    return digest


def files_to_send(root: Path | None, packed: Mapping[str, Path], token_file: str = "") -> dict[str, Path]:
    """Return the files of the project directory and the packed ones, which win, by their name at the destination."""
    return {**(project_files(root, token_file) if root is not None else {}), **packed}


def project_files(root: Path, token_file: str = "") -> dict[str, Path]:
    """Return the files of a project without anything that Shoal keeps for itself, such as tokens."""
    files = {name: path.resolve() for name, path in project.find_files(root).items()}
    tokens = filter(None, (token_file, token_file_of_environment()))
    private = {home().resolve(), *_coordinators(files.values()), *(Path(token).resolve() for token in tokens)}
    return {name: root / name for name, path in files.items() if private.isdisjoint((path, *path.parents))}


def _coordinators(files: Collection[Path]) -> set[Path]:
    """Return the coordinator directories that contain any of these files."""
    parents = {parent for path in files for parent in path.parents}
    return {parent for parent in parents if (parent / journal.FILE).exists() and (parent / "token").exists()}


def describe_upload(root: Path | None, limit_mb: float, packed: Mapping[str, Path], token_file: str = "") -> str:
    """Return one line that says what would be uploaded; raise if it exceeds the limit."""
    files = files_to_send(root, packed, token_file)
    project.check_size(files, int(limit_mb * MB))
    return project.describe(files)
