"""A run in an order that only the student's file knows can be replayed like any other."""

from minimegatron.exercises.check.engine import check_file
from minimegatron.exercises.exercise import find


def test_a_schedule_of_the_students_own_is_replayed(tmp_path):
    exercise, page = find("ex18"), tmp_path / "replay.html"
    found = check_file(exercise, exercise.folder / "solution.py", patience=4.0, replay=page)
    assert found.has_passed, found.text
    assert found.replay == str(page)
    assert "this run's own order" in page.read_text()
