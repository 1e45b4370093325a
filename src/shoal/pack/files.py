"""Files of `files=`: collected on the user's machine, found by members under the same names.

Members on the same disk see symbolic links into the pack in their working directory; other machines receive copies.
Either way every member verifies the hashes before the function starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from shoal.errors import BadFiles, PackDamaged
from shoal.pack import manifest, project

PathLike = str | os.PathLike[str]
Files = Sequence[PathLike] | Mapping[str, PathLike]
_SKIPPED = ("__pycache__",)
_START_AGAIN = "start the run again, and have it write to names other than those in files="


def collect(files: Files) -> dict[str, Path]:
    """Return the path of every file by the name that members will use; directories are expanded.

    Raise BadFiles for a missing file, an invalid name, or two files of one name.
    """
    if isinstance(files, str | os.PathLike):
        raise BadFiles(
            f"files={os.fspath(files)!r} is one path", do="pass a list of paths, or a dict of names to paths"
        )
    pairs = (
        list(files.items()) if isinstance(files, Mapping) else [(Path(path).absolute().name, path) for path in files]
    )
    collected: dict[str, Path] = {}
    for name, path in pairs:
        for inner, source in _expand(_checked_name(name), Path(path).absolute()):
            if inner in collected and collected[inner] != source:
                raise BadFiles(
                    f"two files in files= have the name {inner}",
                    why=f"{collected[inner]} and {source}",
                    do="pass a dict that gives them different names",
                )
            collected[inner] = source
    project.check_names(collected, "rename it, or leave it out of files=")
    return collected


def put(directory: Path, files: Mapping[str, Path]) -> dict[str, str]:
    """Copy files into a pack; return their hashes by name."""
    hashes = {}
    for name, source in files.items():
        try:
            hashes[name] = manifest.put_file(directory, source)
        except OSError as error:
            raise BadFiles(f"{source} cannot be copied", why=error.strerror or str(error)) from error
    return hashes


def link_files(pack: Path, hashes: Mapping[str, str], directory: Path) -> None:
    """Create a symbolic link into the pack for every file, under its name in `directory`."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, digest in hashes.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to((pack / manifest.BLOBS / digest).absolute())


def files_to_send(pack: Path, contents: manifest.PackManifest) -> dict[str, Path]:
    """Return the files of a pack that remote machines need, by their path in the working directory there."""
    folder = manifest.REMOTE_FOLDER
    pack_files = [manifest.MANIFEST, manifest.SIGNATURE]
    pack_files += [f"{manifest.BLOBS}/{contents.function.pickled}"] if contents.function.pickled else []
    modules = {f"{folder}/{manifest.MODULES}/{name}": digest for name, digest in contents.modules.items()}
    blobs = {name: pack / manifest.BLOBS / digest for name, digest in (contents.files | modules).items()}
    return blobs | {f"{folder}/{name}": pack / name for name in pack_files}


def verify(hashes: Mapping[str, str], directory: Path) -> None:
    """Raise PackDamaged unless every file in `directory` has the contents that were copied into the pack."""
    for name, digest in hashes.items():
        path = directory / name
        try:
            actual = manifest.hash_file(path)
        except OSError as error:
            raise PackDamaged(
                f"{name} of files= cannot be read", where=str(path), why=error.strerror or str(error), do=_START_AGAIN
            ) from error
        if actual != digest:
            raise PackDamaged(
                f"{name} of files= does not match its hash",
                where=str(path),
                why=f"it was modified after shoal.run copied it: expected SHA-256 {digest:.12}, found {actual:.12}",
                do=_START_AGAIN,
            )


def _checked_name(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or path == PurePosixPath("."):
        raise BadFiles(f"invalid file name {name!r} in files=", why="it must be a path below the working directory")
    return str(path)


def _expand(name: str, path: Path) -> Iterator[tuple[str, Path]]:
    """Yield a file, or all files of a directory, with their names."""
    if path.is_dir():
        inner_names = list(project.list_names(path, _SKIPPED))
        for inner in inner_names:
            if not (path / inner).is_dir():
                _check_file(path / inner)
        yield from ((f"{name}/{inner}", path / inner) for inner in sorted(project.follow_links(path, inner_names)))
    else:
        _check_file(path)
        yield name, path


def _check_file(path: Path) -> None:
    if not path.exists():
        raise BadFiles(f"no such file: {path}", do="paths are relative to the current directory of Python")
    if not path.is_file():
        raise BadFiles(f"{path} is neither a file nor a directory", do="leave it out of files=")
