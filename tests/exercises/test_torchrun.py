"""A student's file under plain torchrun: how its processes end, and what they leave."""

import time
from pathlib import Path

import pytest

from minimegatron.exercises.check import torchrun
from tests.exercises.sample.ex00_ring import EXERCISE
from tests.rank_programs import run_programs
from tests.ranks import run_ranks

RIGHT = "    total = value.clone()\n    dist.all_reduce(total)\n    return total\n"
HEAD = (
    "import atexit\nimport torch.distributed as dist\n"
    "from tests.lingering import linger\n\n\ndef ring_sum(value):\n"
)
TAIL = (
    "\n\nif __name__ == '__main__':\n"
    "    from minimegatron.exercises import torchrun\n"
    "    from tests.exercises.sample.ex00_ring import EXERCISE\n"
    "    torchrun.exercise_of = lambda path: EXERCISE\n"
    "    from minimegatron.exercises.check import main\n"
    # Registered first, so called last.
    "    atexit.register(lambda: print('groups at the end:', dist.is_initialized()))\n"
    "    main(__file__)\n"
)


def write(folder: Path, body: str, head: str = HEAD) -> Path:
    path = folder / "ex00_ring.py"
    path.write_text(head + body + TAIL)
    return path


def run(path: Path, num_ranks: int) -> tuple[list[int], list[str]]:
    """Exit codes and what was printed; no folder is left."""
    temporary = path.parent / "temporary"
    temporary.mkdir()
    codes, printed = run_programs([path], num_ranks, TMPDIR=temporary)
    assert not list(temporary.glob("minimegatron-*"))
    return codes, printed


@pytest.mark.full
def test_a_message_still_being_freed_does_not_abort_the_end(tmp_path):
    """The cause of `terminate called without an active exception` after a run that went well."""
    body = f"    if len(value) == 4:\n        linger()\n{RIGHT}"
    codes, printed = run(write(tmp_path, body), 2)
    assert codes == [0, 0], printed
    assert "".join(printed).count("[ok]") == 1
    assert "[ok] ex00_ring: All public checks passed" in printed[0]


def test_the_wrong_number_of_ranks_is_an_exit_code(tmp_path):
    codes, printed = run(write(tmp_path, RIGHT), 1)
    assert codes == [2], printed


def test_a_missing_function_is_told_once(tmp_path):
    path = write(tmp_path, RIGHT)
    path.write_text(path.read_text().replace("def ring_sum", "def another"))
    codes, printed = run(path, 2)
    assert codes == [1, 0], printed


@pytest.mark.full
def test_groups_are_destroyed_and_nothing_is_left(tmp_path):
    codes, printed = run(write(tmp_path, RIGHT), 2)
    assert codes == [0, 0] and "Not right yet" not in printed[0], printed
    assert all("groups at the end: False" in text for text in printed), printed


@pytest.mark.full
def test_a_wrong_answer_ends_all_ranks_at_once(tmp_path):
    codes, printed = run(write(tmp_path, RIGHT.replace("return total", "return total / 2")), 2)
    assert codes == [1, 0] and "Not right yet" in printed[0], printed
    # No rank waits for Python to end: another may stand in a collective that nobody joins.
    assert not any("groups at the end" in text for text in printed), printed


def leave_the_board() -> list[bool]:
    board = torchrun._Board(EXERCISE, Path(__file__), time.monotonic())
    try:
        with board:
            begun = board.listener.is_alive()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return [begun, board.listener.is_alive()]


def test_the_thread_at_the_store_ends_with_the_check():
    assert run_ranks(leave_the_board, 1) == [[True, False]]
