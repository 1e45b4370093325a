"""Requirements and lock files, rewritten for other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import BadEnvironment
from shoal.pack.environments import requirements


def test_files_that_a_requirements_file_refers_to_are_included(tmp_path: Path) -> None:
    (tmp_path / "deps").mkdir()
    (tmp_path / "ours-1.0-py3-none-any.whl").write_bytes(b"wheel")
    (tmp_path / "deps" / "base.txt").write_text("-c limits.txt\nnumpy  # arrays\n")
    (tmp_path / "deps" / "limits.txt").write_text("-r base.txt\nnumpy<3\n")
    (tmp_path / "requirements.txt").write_text(
        "# all\n--find-links /opt/wheels\n-rdeps/base.txt\n--constraint=deps/limits.txt\n./ours-1.0-py3-none-any.whl\n"
        "torch==2.13.0 \\\n    --hash=sha256:aa\nthat @ https://host/that-1.0.whl\n-r https://host/more.txt\n"
    )
    files = requirements.gather(tmp_path / "requirements.txt")
    assert files["ours-1.0-py3-none-any.whl"] == tmp_path / "ours-1.0-py3-none-any.whl"
    assert bytes(files["requirements.txt"]).decode().splitlines() == [
        "# all",
        "--find-links /opt/wheels",
        "-r included-1.txt",
        "--constraint included-2.txt",
        "./ours-1.0-py3-none-any.whl",
        "torch==2.13.0      --hash=sha256:aa",
        "that @ https://host/that-1.0.whl",
        "-r https://host/more.txt",
    ]
    assert files["included-1.txt"] == b"-c included-2.txt\nnumpy  # arrays\n"
    assert files["included-2.txt"] == b"-r included-1.txt\nnumpy<3\n"


@pytest.mark.parametrize(
    "line",
    [
        "-e .",
        "--editable=./lib",
        "./lib",
        "/abs/lib",
        "lib/",
        "./gone.whl",
        "-r gone.txt",
        "-f ./lib",
        "--find-links=lib",
    ],
)
def test_directory_of_this_disk_and_missing_file_are_rejected(tmp_path: Path, line: str) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "requirements.txt").write_text(f"numpy\n{line}\n")
    with pytest.raises(BadEnvironment) as raised:
        requirements.gather(tmp_path / "requirements.txt")
    assert raised.value.do


def test_lock_file_becomes_requirements_with_all_hashes() -> None:
    wheels = [{"url": "https://host/b.whl", "hashes": {"sha256": "bb"}}, {"hashes": {"sha256": "aa"}}]
    numpy = {"name": "numpy", "version": "2.0", "wheels": wheels, "sdist": {"hashes": {"sha256": "cc"}}}
    colorama = {"name": "colorama", "version": "1", "marker": "os_name == 'nt'", "wheels": wheels[1:]}
    assert requirements.from_lock({"lock-version": "1.0", "packages": [numpy, colorama]}).splitlines() == [
        "numpy==2.0 --hash=sha256:aa --hash=sha256:bb --hash=sha256:cc",
        "colorama==1 ; os_name == 'nt' --hash=sha256:aa",
    ]
    with pytest.raises(BadEnvironment, match="ours of the lock file does not come from an index"):
        requirements.from_lock({"lock-version": "1.0", "packages": [{"name": "ours", "directory": {"path": "."}}]})
    with pytest.raises(BadEnvironment, match="unsupported lock file"):
        requirements.from_lock({"version": 1, "package": []})


@pytest.mark.parametrize(
    "packages",
    [
        '[[packages]]\nversion = "2.0"\nwheels = [{hashes = {sha256 = "aa"}}]',
        '[[packages]]\nname = "numpy"\nversion = "2.0"\nwheels = [{url = "https://host/b.whl"}]',
        '[[packages]]\nname = "numpy"\nversion = 2.0\nwheels = [{hashes = {sha256 = "aa"}}]',
        '[[packages]]\nname = "numpy"\nversion = "2.0"\nwheels = [{hashes = "aa"}]',
        '[[packages]]\nname = "numpy"\nversion = "2.0"\nwheels = {hashes = {sha256 = "aa"}}',
        'packages = ["numpy"]',
        'packages = "numpy"',
        "",
    ],
)
def test_invalid_lock_file_is_rejected_with_its_path_and_a_remedy(tmp_path: Path, packages: str) -> None:
    lock = tmp_path / "pylock.toml"
    lock.write_text(f'lock-version = "1.0"\ncreated-by = "hand"\n{packages}\n')
    with pytest.raises(BadEnvironment, match="invalid lock file") as raised:
        requirements.gather(lock)
    assert raised.value.where == str(lock)
    assert raised.value.why
    assert raised.value.do
