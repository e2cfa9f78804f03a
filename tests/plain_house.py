"""What the third edition of the house makes shorter: before it, now, and what it aims at.

The figures of before are the first caps of `test_plain_runs`, and of the list of files those of the
commit that it was written for, all counted as today. They are not measured again: that code is gone.
"""

from typing import NamedTuple


class Measure(NamedTuple):
    """One row."""

    what: str
    """Which of `plain_runs.figures_of`."""
    before: int | None
    aim: int | None = None
    """None where there is none, as in `before`."""


MEASURES = (
    Measure("spine: files", 74, 60),
    Measure("spine: lines", 10057, 5400),
    Measure("spine: statements", 6772, 3700),
    Measure("spine: lines of branches never taken", 1167, 162),
    Measure("spine: functions never entered", 368, 30),
    Measure("spine: lines outside functions", 2000),
    Measure("spine: lines of signatures", 2477),
    Measure("files loaded by a GPT run", 254, 170),
    Measure("one step: lines reported, rooms apart", 1468),
    Measure("one step: lines reported, with doors", 1703, 1300),
    Measure("one step: files, rooms apart", None, 40),
    Measure("calls of tp2·pp2, rooms apart", 2656),
    Measure("calls of tp2·pp2 sequence, rooms apart", 3031),
    Measure("calls of pp2·dp2 ZeRO-1, rooms apart", 2642),
    Measure("calls of tp2·dp2 fp16, rooms apart", 4098),
    Measure("calls of pp2·v2, rooms apart", 3085),
    Measure("wrappers before 1F1B", 4, 2),
    Measure("send_forward to the wire: functions, rooms apart", 11, 5),
    Measure("send_forward to the wire: files, rooms apart", 2, 1),
    Measure("recv_forward, its message from the wire: functions, rooms apart", 16),
    Measure("1F1B to its first receive: calls, rooms apart", 55, 60),
    Measure("chunk.forward_step to GPTModel.forward: calls, rooms apart", 123, 60),
    Measure("chunk.forward_step to GPTModel.forward: files, rooms apart", 25, 12),
    Measure("last gradient to the wire: functions, rooms apart", 20, 12),
    Measure("last gradient to the wire: files, rooms apart", 8, 4),
    Measure("optimizer.step to the learning rate: calls, rooms apart", 829),
)

SECTIONS = {
    "The loop": (8, 1214, 7, 620),
    "Groups": (4, 802, 4, 440),
    "The schedule": (8, 1721, 6, 850),
    "Messages": (7, 1228, 1, 190),
    "The data": (6, 634, 4, 230),
    "The model": (16, 1598, 15, 970),
    "Tensor parallel": (8, 1040, 8, 700),
    "Gradients": (5, 772, 5, 500),
    "The optimizer": (7, 904, 7, 540),
    "Beside the step": (5, 496, 2, 130),
}
"""Of each section of the spine: files and lines before, files and lines aimed at."""


def house_table(figures: dict[str, int], sections: dict[str, tuple[int, int]]) -> str:
    """Both tables as text; `sections` has files and lines of today."""
    lines = [f"{'the house':66}{'before':>8}{'is':>8}{'aim':>8}"]
    for row in MEASURES:
        before, aim = ("" if x is None else f"{x:,}" for x in (row.before, row.aim))
        lines.append(f"{row.what:66}{before:>8}{figures[row.what]:8,}{aim:>8}")
    lines += ["", f"{'section: files, lines':26}{'before':>12}{'is':>12}{'aim':>12}"]
    for name, (files, code, aim_files, aim_code) in SECTIONS.items():
        pairs = ((files, code), sections[name], (aim_files, aim_code))
        lines.append(f"{name:26}" + "".join(f"{a:4}{b:8,}" for a, b in pairs))
    return "\n".join(lines)
