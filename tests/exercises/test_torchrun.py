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


def test_a_message_still_being_freed_does_not_abort_the_end(tmp_path):
    """The cause of `terminate called without an active exception` after a run that went well."""
    body = f"    if len(value) == 4:\n        linger()\n{RIGHT}"
    codes, printed = run_programs([write(tmp_path, body)], 2, TMPDIR=tmp_path)
    assert codes == [0, 0], printed
    assert "[ok] ex00_ring: All public checks passed" in printed[0]
    assert all("groups at the end: False" in text for text in printed)


@pytest.mark.parametrize("how", ["right", "wrong number of ranks", "missing function"])
def test_groups_are_destroyed_and_nothing_is_left(how, tmp_path):
    path = write(tmp_path, RIGHT)
    num_ranks, expected = 2, [0, 0]
    if how == "wrong number of ranks":
        num_ranks, expected = 1, [2]
    elif how == "missing function":
        path.write_text(path.read_text().replace("def ring_sum", "def another"))
        expected = [1, 0]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    codes, printed = run_programs([path], num_ranks, TMPDIR=temporary)
    assert codes == expected, printed
    assert all("groups at the end: False" in text for text in printed), printed
    assert not list(temporary.glob("minimegatron-*"))


def test_a_wrong_file_leaves_no_folder(tmp_path):
    path = write(tmp_path, RIGHT.replace("return total", "return total / 2"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    codes, printed = run_programs([path], 2, TMPDIR=temporary)
    assert codes == [1, 0] and "Not right yet" in printed[0], printed
    assert not list(temporary.glob("minimegatron-check*"))


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
