from __future__ import annotations

from dataclasses import dataclass

from shoal.core.draft import Draft


@dataclass(frozen=True)
class Counter:
    count: int = 0
    last_at: float = 0.0


def test_later_rule_sees_what_an_earlier_rule_changed() -> None:
    draft: Draft[Counter, str] = Draft(Counter(), now=7.0)
    draft.set(count=draft.state.count + 1)
    draft.set(count=draft.state.count + 1, last_at=draft.now)
    assert draft.freeze() == Counter(2, 7.0)


def test_result_is_the_next_state_and_the_instructions_in_order() -> None:
    before = Counter()
    draft: Draft[Counter, str] = Draft(before, now=7.0)
    draft.instruct("first")
    draft.set(count=1)
    draft.instruct("second")
    assert draft.result() == (Counter(1), ("first", "second"))
    assert before == Counter(), "the state before stays as it was"


def test_draft_that_copied_a_collection_puts_it_back() -> None:
    class CountingDraft(Draft[Counter, str]):
        names: tuple[str, ...] = ("a", "b")

        def freeze(self) -> Counter:
            return Counter(len(self.names))

    assert CountingDraft(Counter(), 0.0).result() == (Counter(2), ())
