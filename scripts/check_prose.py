#!/usr/bin/env python3
"""Check what a machine can see of plain English: docstrings, words, class names, folders, commit subjects.

scripts/check_prose.py            check everything; exit 1 with one line per finding
scripts/check_prose.py PATH...    only findings in these files or folders
scripts/check_prose.py --stats    print the figures that CONTRIBUTING.md names
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "shoal"
GLOSSARY = ROOT / "docs" / "glossary.toml"
# Subjects of commits before this one are as they are.
FIRST_PLAIN_COMMIT = "e90fa62"
SUBJECT_LIMIT = 72
FOLDER_LIMIT = 13
UNBOUNDED_FOLDERS = {"cli/verbs"}
# The public `Run` of each framework is the same idea for two audiences.
SHARED_CLASSES = {"Run"}

NOT_VERBS = frozenset(
    """a all an and another any anything as at be because both by each either every everybody everyone everything few
    first for from how if in it its last least many more most neither nobody none nothing now of on one only our
    same somebody someone something such that the their them then there these they this those to two what whatever
    when where whether which who whoever whole whom whose why with within without you your""".split()
)
# Identifiers that say nothing of what they hold.
VAGUE_NAMES = frozenset({"one", "ones", "found", "told", "said", "there", "here", "mine", "asked"})


class Finding(NamedTuple):
    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.message}"


def main(arguments: list[str]) -> int:
    """Print the findings, or with --stats the figures; return the exit code."""
    if arguments == ["--stats"]:
        print(*stats(), sep="\n")
        return 0
    only = [Path(argument).resolve() for argument in arguments]
    findings = [*check_files(only), *([] if only else [*check_shared_classes(), *check_folders(), *check_subjects()])]
    for finding in findings:
        print(finding)
    print(f"prose: {len(findings)} findings")
    return 1 if findings else 0


def check_files(only: list[Path]) -> Iterator[Finding]:
    """Yield the findings in every Python file below the checked folders."""
    banned = banned_words()
    for path in python_files():
        if only and not any(path == wanted or wanted in path.parents for wanted in only):
            continue
        tree = ast.parse(path.read_text())
        in_source = SOURCE in path.parents
        if in_source:
            yield from (Finding(path, *finding) for finding in check_docstrings(tree))
            yield from (Finding(path, *finding) for finding in check_names(tree))
        yield from (Finding(path, *finding) for finding in check_words(path.read_text(), banned))


def python_files() -> list[Path]:
    """Return the Python files of the package, the tests, the examples and the benchmarks."""
    folders = [SOURCE, ROOT / "tests", ROOT / "examples", ROOT / "benchmarks"]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [path for path in files if "__pycache__" not in path.parts and ".envs" not in path.parts]


def check_docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield functions whose docstring does not begin with a verb."""
    for node, text in function_docstrings(tree):
        if not begins_with_verb(text):
            yield node.lineno, f"{node.name}: docstring should begin with a verb: {text.splitlines()[0][:80]!r}"


def function_docstrings(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Yield every function that is not a property, with its docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node):
            text = ast.get_docstring(node)
            if text:
                yield node, text


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a decorator makes this function an attribute."""
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return bool(names & {"property", "cached_property"})


def begins_with_verb(text: str) -> bool:
    """Return whether the first word may be an imperative verb."""
    first = re.split(r"[^A-Za-z-]", text.strip(), maxsplit=1)[0].lower()
    return bool(first) and first not in NOT_VERBS


def check_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield variables and parameters whose name says nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE_NAMES:
            yield node.lineno, f"name {node.id!r} does not say what it holds"
        elif isinstance(node, ast.arg) and node.arg in VAGUE_NAMES:
            yield node.lineno, f"parameter {node.arg!r} does not say what it holds"


def banned_words() -> re.Pattern[str]:
    """Return a pattern of the words that the glossary replaces."""
    glossary = tomllib.loads(GLOSSARY.read_text())
    words = [word for entry in (*glossary["term"], *glossary["words"]) for word in entry.get("not", ())]
    return re.compile(rf"\b({'|'.join(words)})\b", re.IGNORECASE)


def check_words(text: str, banned: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Yield banned words in comments, strings and names."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, tokenize.NAME):
            for match in banned.finditer(token.string.replace("_", " ")):
                line = token.start[0] + token.string[: match.start()].count("\n")
                yield line, f"the glossary has another word for {match.group()!r}"


def check_shared_classes() -> Iterator[Finding]:
    """Yield classes that share their name with another of the package."""
    places: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append((path, node.lineno))
    for name, where in places.items():
        if len(where) > 1 and name not in SHARED_CLASSES:
            path, line = where[0]
            yield Finding(path, line, f"class {name} is defined {len(where)} times")


def check_folders() -> Iterator[Finding]:
    """Yield folders that do not say what they are for and may import, or that hold too many modules."""
    for init in sorted(SOURCE.rglob("__init__.py")):
        folder = init.parent
        name = folder.relative_to(SOURCE).as_posix()
        docstring = ast.get_docstring(ast.parse(init.read_text())) or ""
        if "May import" not in docstring:
            yield Finding(init, 1, 'docstring should say what the folder is for, then "May import: ..."')
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        if len(modules) > FOLDER_LIMIT and name not in UNBOUNDED_FOLDERS:
            yield Finding(init, 1, f"{len(modules)} modules in one folder; at most {FOLDER_LIMIT}")


def check_subjects() -> Iterator[Finding]:
    """Yield commits whose subject is too long."""
    log = ["git", "log", "--no-merges", "--format=%h %s", f"{FIRST_PLAIN_COMMIT}..HEAD"]
    listed = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        commit, _, subject = line.partition(" ")
        if len(subject) > SUBJECT_LIMIT:
            yield Finding(ROOT / ".git", 1, f"subject of {commit} has {len(subject)} characters: {subject[:50]}…")


def stats() -> list[str]:
    """Return the figures of the package's prose, a line each."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    docstrings = [text for tree in trees.values() for _, text in function_docstrings(tree)]
    verbs = sum(begins_with_verb(text) for text in docstrings)
    prose, code = 0, 0
    for path, tree in trees.items():
        lines = prose_lines(path.read_text(), tree)
        prose += len(lines)
        code += sum(
            1 for number, line in enumerate(path.read_text().splitlines(), 1) if line.strip() and number not in lines
        )
    largest = max((len(list(init.parent.glob("*.py"))) - 1, init.parent.name) for init in SOURCE.rglob("__init__.py"))
    return [
        f"function docstrings that begin with a verb: {verbs} of {len(docstrings)} ({verbs / len(docstrings):.1%})",
        f"lines of prose to lines of code: {prose} / {code} ({prose / code:.1%})",
        f"largest folder: {largest[0]} modules ({largest[1]})",
    ]


def prose_lines(text: str, tree: ast.AST) -> set[int]:
    """Return the numbers of the lines that hold docstrings or comments alone."""
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("#")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
