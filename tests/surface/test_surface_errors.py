"""Error codes: stable, unique, explained."""

import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from shoal import errors
from shoal.errors import ShoalError, launch, membership, storage, training, usage

FAMILIES = {
    "S1": errors.UsageError,
    "S2": errors.MembershipError,
    "S3": errors.TrainingError,
    "S4": errors.LaunchError,
    "S5": errors.StorageError,
}


def below(kind: type[ShoalError]) -> Iterator[type[ShoalError]]:
    for child in kind.__subclasses__():
        if child.__module__.startswith("shoal.errors."):
            yield child
        yield from below(child)


KINDS = sorted(set(below(ShoalError)), key=lambda kind: (kind.code, kind.__name__))


def test_error_codes_are_frozen(frozen: Callable[[str, str], None]) -> None:
    frozen("errors.txt", "\n".join(f"{kind.code} exit {kind.exit_code} {kind.__name__}" for kind in KINDS))


def test_no_two_errors_share_a_code() -> None:
    codes = [kind.code for kind in KINDS]
    assert sorted(set(codes)) == codes


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_an_error_is_explained_and_belongs_to_its_family(kind: type[ShoalError]) -> None:
    assert re.fullmatch(r"S[1-5]\d\d", kind.code)
    assert issubclass(kind, FAMILIES[kind.code[:2]])
    assert "code" in vars(kind), "an error must not inherit its code"
    assert (inspect.getdoc(kind) or "").endswith("."), "the docstring is what `shoal explain` prints"


def test_an_error_prints_what_where_why_do_and_its_code() -> None:
    shown = str(errors.PeerUnreachable("a cannot reach b", where="world 2", why="a firewall", do="open the port"))
    assert shown.splitlines() == [
        "error[S204] a cannot reach b",
        "  where  world 2",
        "  why    a firewall",
        "  do     open the port",
        "  more   shoal explain S204",
    ]


@pytest.mark.parametrize("module", [usage, membership, training, launch, storage], ids=lambda module: module.__name__)
def test_module_holds_one_range_in_the_order_of_its_codes(module: ModuleType) -> None:
    kinds = [kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__]
    codes = [kind.code for kind in kinds]
    assert codes == sorted(codes)
    assert {FAMILIES[code[:2]] for code in codes} == {kinds[0]}
