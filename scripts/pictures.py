#!/usr/bin/env python3
"""Draw docs/pictures/*.svg: a step, a loss, a join and an allocation.

    scripts/pictures.py            write the pictures
    scripts/pictures.py --check    exit 1 if a picture is out of date

The pictures cannot drift from the code, because the code draws them. A loss, a join and an allocation are lists of
events that go through the pure decisions of `core`; every arrow from the coordinator is an instruction that came out.
The step takes its shares from the emulator's cost model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from shoal.core.membership import events as ev
from shoal.core.membership.decide import decide
from shoal.core.membership.state import MembershipSettings, MembershipState
from shoal.core.provisioning import events as pe
from shoal.core.provisioning.decide import ProvisioningState, expired_timers
from shoal.core.provisioning.decide import decide as decide_provisioning
from shoal.core.world import Address
from shoal.testing.emulated_speeds import best_shares

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
COORDINATOR = "coordinator"
LANE_PX, ROW_PX, TOP_PX = 190, 34, 64
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f } .small { font-size: 11px; fill: #57606a }
  .lane { stroke: #d0d7de; stroke-width: 1.5 } .head { fill: #eaeef2; stroke: #afb8c1 }
  .event { stroke: #0969da; stroke-width: 1.6 } .order { stroke: #1a7f37; stroke-width: 1.6 }
  .note { fill: #fff8c5; stroke: #d4a72c } .lost { stroke: #cf222e; stroke-width: 3 }
  .data { fill: #b6e3ff } .compute { fill: #aceebb } .exchange { fill: #ffd8b5 } .apply { fill: #e2c5ff }
"""


@dataclass(frozen=True, slots=True)
class Arrow:
    """One message between two lanes; `kind` is event or order."""

    source: str
    target: str
    text: str
    kind: str


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence over one lane; `lost` draws the end of that lane."""

    lane: str
    text: str
    lost: bool = False


Row = Arrow | Note


def main(arguments: list[str]) -> int:
    """Write or check every picture; return the exit code."""
    pictures = {"step": step(), "loss": loss(), "join": join(), "allocation": allocation()}
    stale = [name for name, svg in pictures.items() if not _is_current(FOLDER / f"{name}.svg", svg)]
    if arguments == ["--check"]:
        for name in stale:
            print(f"docs/pictures/{name}.svg is out of date; run scripts/pictures.py")
        return int(bool(stale))
    FOLDER.mkdir(exist_ok=True)
    for name in stale:
        (FOLDER / f"{name}.svg").write_text(pictures[name])
    return 0


def _is_current(path: Path, svg: str) -> bool:
    return path.exists() and path.read_text() == svg


def loss() -> str:
    """Return the picture of a member that is killed in step 40."""
    play = Membership("a", "b", "c", step=40)
    world = play.world
    play.note("c", "kill -9", lost=True)
    play.event("a", ev.WorldBroken("a", world, 40, suspects=("c",)))
    play.event("b", ev.WorldBroken("b", world, 40, suspects=("c",)))
    play.event("agent", ev.MemberLost("c", "killed by signal 9"))
    play.note("a", "step 40 again, two shares")
    return sequence(["a", "b", "c", COORDINATOR, "agent"], play.rows, "A member is lost in step 40")


def join() -> str:
    """Return the picture of a member that joins a running world."""
    play = Membership("a", "b", step=40, most=3)
    play.event("c", ev.MemberConnected("c", "1", Address("h", 3)))
    play.event("c", ev.MemberReady("c", "model", None))
    play.note("a", f"connect world {play.proposed} while training")
    play.note("a", "reports of step 43 agree: switch")
    play.event("a", ev.WorldEntered("a", play.proposed, 43))
    play.event("b", ev.WorldEntered("b", play.proposed, 43))
    play.event("c", ev.WorldEntered("c", play.proposed, 43))
    play.note("c", "copies the state, weight 0, then a share")
    return sequence(["a", "b", "c", COORDINATOR], play.rows, "A member joins while the others train")


def allocation() -> str:
    """Return the picture of a machine that is requested from a pool, used, and released."""
    state, rows = ProvisioningState(), list[Row]()

    def happen(source: str, event: pe.Event, now: float) -> None:
        nonlocal state
        rows.append(Arrow(source, COORDINATOR, type(event).__name__, "event"))
        state, instructions = decide_provisioning(state, event, now)
        for instruction in instructions:
            if isinstance(instruction, pe.SubmitAllocation | pe.CancelAllocation):
                text = f"{type(instruction).__name__} {instruction.allocation}"
                rows.append(Arrow(COORDINATOR, "pool spot", text, "order"))

    happen(COORDINATOR, pe.PoolsConfigured((pe.PoolInfo("spot", "slurm", limit=4),)), 0.0)
    happen("run", pe.DemandChanged((pe.MachineDemand("train", ("spot",), slots=1),)), 1.0)
    happen("pool spot", pe.AllocationSubmitted("spot", "spot-1", "job 4711"), 2.0)
    listed = (pe.ListedAllocation("spot-1", "job 4711", running=True),)
    happen("pool spot", pe.PoolListed("spot", listed), 9.0)
    happen("agent spot-1", pe.AgentArrived("spot-1"), 10.0)
    rows.append(Note("agent spot-1", "starts members"))
    happen("run", pe.DemandChanged(()), 900.0)
    for timer in expired_timers(state, 1000.0):
        happen(COORDINATOR, timer, 1000.0)
    happen("pool spot", pe.AllocationEnded("spot-1"), 1002.0)
    return sequence(["run", COORDINATOR, "pool spot", "agent spot-1"], rows, "An allocation, from request to release")


class Membership:
    """A membership that plays events and keeps what they looked like."""

    def __init__(self, *names: str, step: int, most: int = 0) -> None:
        settings = MembershipSettings(min_members=1, max_members=max(len(names), most), regroup_s=0.0)
        self.state, self.rows = MembershipState(settings), list[Row]()
        for port, name in enumerate(names, start=1):
            self._decide(ev.MemberConnected(name, "1", Address("h", port)))
            self._decide(ev.MemberReady(name, "model", None))
        self._decide(ev.TimerFired("regroup"))
        while self.state.world is None or self.state.world.size < len(names):
            self._decide(ev.WorldEntered(names[0], self.proposed, 0))
        self._decide(ev.ProgressRecorded(step))

    @property
    def world(self) -> int:
        """Number of the live world."""
        assert self.state.world is not None
        return self.state.world.number

    @property
    def proposed(self) -> int:
        """Number of the world that is being prepared, or of the live one once it has been entered."""
        return self.state.proposal.number if self.state.proposal is not None else self.world

    def note(self, lane: str, text: str, *, lost: bool = False) -> None:
        """Write a sentence over a lane."""
        self.rows.append(Note(lane, text, lost))

    def event(self, source: str, event: ev.Event) -> None:
        """Draw an event, and every instruction that the decision gives."""
        self.rows.append(Arrow(source, COORDINATOR, type(event).__name__, "event"))
        for instruction in self._decide(event):
            for member in getattr(instruction, "to", ()):
                world = getattr(instruction, "world", None)
                text = type(instruction).__name__ + (f" {world.number}" if world is not None else "")
                self.rows.append(Arrow(COORDINATOR, member, text, "order"))

    def _decide(self, event: ev.Event) -> Iterable[ev.Instruction]:
        self.state, instructions = decide(self.state, event, 100.0)
        return instructions


def sequence(lanes: list[str], rows: list[Row], title: str) -> str:
    """Return a sequence diagram as SVG."""
    at = {lane: LANE_PX // 2 + LANE_PX * index for index, lane in enumerate(lanes)}
    height = TOP_PX + ROW_PX * (len(rows) + 1)
    shapes = []
    ends = {row.lane: index for index, row in enumerate(rows) if isinstance(row, Note) and row.lost}
    for lane, x in at.items():
        bottom = TOP_PX + ROW_PX * (ends[lane] + 1) if lane in ends else height - 12
        shapes.append(f'<line class="lane" x1="{x}" y1="{TOP_PX - 8}" x2="{x}" y2="{bottom}"/>')
        shapes.append(_box(x, TOP_PX - 22, 130, 26, lane, "head"))
    for index, row in enumerate(rows):
        shapes += _row(row, at, TOP_PX + ROW_PX * (index + 1))
    return _svg(LANE_PX * len(lanes), height, title, shapes)


def _row(row: Row, at: dict[str, int], y: int) -> list[str]:
    if isinstance(row, Note):
        x = at[row.lane]
        if row.lost:
            cross = f'<path class="lost" d="M{x - 8} {y - 8}L{x + 8} {y + 8}M{x + 8} {y - 8}L{x - 8} {y + 8}"/>'
            return [cross, f'<text x="{x + 14}" y="{y + 4}">{escape(row.text)}</text>']
        width = 7 * len(row.text) + 16
        return [_box(max(x, width // 2 + 4), y, width, 24, row.text, "note")]
    start, end = at[row.source], at[row.target]
    if start == end:
        return [_box(start, y, 7 * len(row.text) + 16, 24, row.text, "note")]
    tip = end - 5 if end > start else end + 5
    line = f'<line class="{row.kind}" x1="{start}" y1="{y}" x2="{tip}" y2="{y}" marker-end="url(#{row.kind})"/>'
    middle = f'<text class="small" text-anchor="middle" x="{(start + end) // 2}" y="{y - 5}">{escape(row.text)}</text>'
    return [line, middle]


def step() -> str:
    """Return the picture of one step on three members of unequal speed."""
    speeds, batch = (1.0, 0.5, 0.25), 64
    text = ",".join(["sample_s=0.01", *(f"{speed:g}" for speed in speeds)])
    shares = best_shares(text, size=batch, members=len(speeds), step=0)
    left, px_per_s, bar = 150, 700.0, 26
    longest = max(share * 0.01 / speed for share, speed in zip(shares, speeds, strict=True))
    summed = left + 40 + int(longest * px_per_s) + 70
    shapes = []
    for rank, (share, speed) in enumerate(zip(shares, speeds, strict=True)):
        y = TOP_PX + 46 * rank
        computed = left + 40 + int(share * 0.01 / speed * px_per_s)
        shapes.append(f'<text x="12" y="{y + 17}">rank {rank}, speed {speed:g}</text>')
        shapes.append(_bar(left, y, 40, bar, "data", ""))
        shapes.append(_bar(left + 40, y, computed - left - 40, bar, "compute", f"share of {share} samples"))
        shapes.append(_bar(computed, y, summed - computed, bar, "exchange", "sum"))
        shapes.append(_bar(summed, y, 60, bar, "apply", "apply"))
    bottom = TOP_PX + 46 * len(speeds)
    names = {
        "data": "read",
        "compute": "forward and backward",
        "exchange": "buckets and step reports",
        "apply": "commit",
    }
    for index, (kind, name) in enumerate(names.items()):
        shapes.append(_bar(left + 170 * index, bottom + 6, 14, 14, kind, ""))
        shapes.append(f'<text class="small" x="{left + 170 * index + 20}" y="{bottom + 17}">{name}</text>')
    title = f"One step: a global batch of {batch} samples, shares by speed, one commit"
    return _svg(max(summed + 80, left + 700), bottom + 40, title, shapes)


def _bar(x: int, y: int, width: int, height: int, kind: str, text: str) -> str:
    shape = f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="3"/>'
    label = f'<text text-anchor="middle" x="{x + width // 2}" y="{y + 17}">{escape(text)}</text>' if text else ""
    return shape + label


def _box(x: int, y: int, width: int, height: int, text: str, kind: str) -> str:
    shape = (
        f'<rect class="{kind}" x="{x - width // 2}" y="{y - height // 2}" width="{width}" height="{height}" rx="4"/>'
    )
    return f'{shape}<text text-anchor="middle" x="{x}" y="{y + 4}">{escape(text)}</text>'


def _svg(width: int, height: int, title: str, shapes: list[str]) -> str:
    markers = "".join(
        f'<marker id="{kind}" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
        for kind, color in (("event", "#0969da"), ("order", "#1a7f37"))
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    paper = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    heading = f'<text x="12" y="22" font-weight="600">{escape(title)}</text>'
    frame = f"<title>{escape(title)}</title><style>{STYLE}</style><defs>{markers}</defs>\n{paper}{heading}"
    return "\n".join([head, frame, *shapes, "</svg>\n"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
