"""The report of `straggler_detector`, in words.

Torch-free. Counterpart: the lines that `StragglerDetector.report` of `megatron.core.utils` logs.
"""


def straggler_words(
    table: list[list[float]], axes: list[str], num_named: int, work: float = 0.0
) -> str:
    """`table` has a row for each rank: forward and data, in milliseconds a step, then its coordinates.

    Args:
        axes: what the coordinates are of. With a "stage" among them, each stage has a line.
        num_named: how many ranks are named at either end; 1 where so many would be all of them.
        work: floating-point operations of one rank's forwards in a step; 0 where nobody counts them.

    >>> print(straggler_words([[1.0, 0.5, 0], [4.0, 0.0, 1]], ["stage"], 1))
    time of a step's forwards, and of getting its batches (ms):
        stage 0: 1.00, data 0.50
        stage 1: 4.00, data 0.00
        slowest: rank 1 (stage 1) 4.00
        fastest: rank 0 (stage 0) 1.00
    """
    lines = ["time of a step's forwards, and of getting its batches (ms):"]
    for stage, ranks in _ranks_of_stages(table, axes).items():
        forward, data = (sum(table[r][c] for r in ranks) / len(ranks) for c in (0, 1))
        lines.append(f"    stage {stage}: {forward:.2f}, data {data:.2f}")
        if len(ranks) > 1:
            slowest = max(ranks, key=lambda rank: table[rank][0])
            lines[-1] += f"; slowest rank {slowest} {table[slowest][0]:.2f}"
    slowest_first = sorted(range(len(table)), key=lambda rank: -table[rank][0])
    count = num_named if num_named < len(table) else 1
    for title, ranks in (
        ("slowest", slowest_first[:count]),
        ("fastest", slowest_first[::-1][:count]),
    ):
        named = (_name(rank, table, axes) + _rate(table[rank][0], work) for rank in ranks)
        lines.append(f"    {title}: {'; '.join(named)}")
    return "\n".join(lines)


def _ranks_of_stages(table: list[list[float]], axes: list[str]) -> dict[int, list[int]]:
    """Stage -> its ranks; none where nobody said which rank is on which stage."""
    stages: dict[int, list[int]] = {}
    for rank, row in enumerate(table if "stage" in axes else []):
        stages.setdefault(int(row[2 + axes.index("stage")]), []).append(rank)
    return dict(sorted(stages.items()))


def _name(rank: int, table: list[list[float]], axes: list[str]) -> str:
    values = zip(axes, table[rank][2:], strict=True)
    where = ", ".join(f"{axis} {value:.0f}" for axis, value in values)
    return f"rank {rank}{f' ({where})' if where else ''} {table[rank][0]:.2f}"


def _rate(milliseconds: float, work: float) -> str:
    if not (work and milliseconds):
        return ""
    return f" ({work / (milliseconds * 1e9):.2f} TF/s)"
