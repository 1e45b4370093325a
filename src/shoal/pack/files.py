"""The files that a run takes along, and how members find them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from shoal.errors import BadFiles, PackDamaged
from shoal.pack import manifest, project

PathLike = str | os.PathLike[str]
Files = Sequence[PathLike] | Mapping[str, PathLike]
_SKIPPED = ("__pycache__",)
_AGAIN = "start the run again, and let it write to other names than those of files="


def collect(files: Files) -> dict[str, Path]:
    """Every single file by the name that members will find it under; directories are entered."""
    if isinstance(files, str | os.PathLike):
        raise BadFiles(
            f"files={os.fspath(files)!r} is one path", do="pass a list of paths, or a dict of names to paths"
        )
    pairs = list(files.items()) if isinstance(files, Mapping) else [(Path(one).absolute().name, one) for one in files]
    found: dict[str, Path] = {}
    for name, path in pairs:
        for inner, source in _below(_checked(name), Path(path).absolute()):
            if inner in found and found[inner] != source:
                raise BadFiles(
                    f"two of the files are called {inner}",
                    why=f"{found[inner]} and {source}",
                    do="pass a dict, and give them different names",
                )
            found[inner] = source
    project.check_names(found, "rename it, or leave it out of files=")
    return found


def put(directory: Path, files: Mapping[str, Path]) -> dict[str, str]:
    """Copy these files into a pack; the hash of each by its name."""
    kept = {}
    for name, source in files.items():
        try:
            kept[name] = manifest.put_file(directory, source)
        except OSError as error:
            raise BadFiles(f"{source} cannot be copied", why=error.strerror or str(error)) from error
    return kept


def link_files(pack: Path, kept: Mapping[str, str], where: Path) -> None:
    """Let every file appear under its name in a directory; what it holds stays in the pack."""
    where.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, digest in kept.items():
        path = where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to((pack / manifest.BLOBS / digest).absolute())


def files_to_send(pack: Path, contents: manifest.PackManifest) -> dict[str, Path]:
    """What travels of a pack to machines that do not see it: by its place in the working directory there."""
    name = manifest.REMOTE_FOLDER
    own = [manifest.MANIFEST, manifest.SIGNATURE]
    own += [f"{manifest.BLOBS}/{contents.function.pickled}"] if contents.function.pickled else []
    named = contents.files | {f"{name}/{manifest.MODULES}/{one}": digest for one, digest in contents.modules.items()}
    found = {one: pack / manifest.BLOBS / digest for one, digest in named.items()}
    return found | {f"{name}/{one}": pack / one for one in own}


def verify(kept: Mapping[str, str], where: Path) -> None:
    """An error unless every file in a directory holds what it held when it was copied into the pack."""
    for name, digest in kept.items():
        path = where / name
        try:
            found = manifest.hash_file(path)
        except OSError as error:
            raise PackDamaged(
                f"{name} of files= cannot be read", where=str(path), why=error.strerror or str(error), do=_AGAIN
            ) from error
        if found != digest:
            raise PackDamaged(
                f"{name} is not what was given with files=",
                where=str(path),
                why="it was changed after shoal.run had copied it",
                do=_AGAIN,
            )


def _checked(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or path == PurePosixPath("."):
        raise BadFiles(f"a file cannot be called {name!r}", why="members find it below their working directory")
    return str(path)


def _below(name: str, path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_dir():
        names = list(project.list_names(path, _SKIPPED))
        for one in names:
            if not (path / one).is_dir():
                _check_file(path / one)
        yield from ((f"{name}/{one}", path / one) for one in sorted(project.follow_links(path, names)))
    else:
        _check_file(path)
        yield name, path


def _check_file(path: Path) -> None:
    if not path.exists():
        raise BadFiles(f"there is no file {path}", do="paths are relative to the directory that Python runs in")
    if not path.is_file():
        raise BadFiles(f"{path} is neither a file nor a directory", do="leave it out of files=")
