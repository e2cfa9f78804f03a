"""Tasks: what sorting is worth, and what a task of one's own may not do."""

import pytest

from minimegatron.core.datasets.utils import DataError
from minimegatron.rl.tasks import load_task, sort_digits

FILE = """
from minimegatron.rl.tasks import Task
def task(reward):
    return Task([(1, 2)], [], 2, 7, 8, reward, lambda prompt, answer: answer == prompt)
def good():
    return task(lambda prompt, answer: len(answer))
def not_a_number():
    return task(lambda prompt, answer: float("nan"))
def a_word():
    return task(lambda prompt, answer: "good")
def nothing():
    return None
"""


def test_sorting_is_worth_its_places_and_a_half_for_all():
    task = sort_digits()
    assert task.vocab_size == 8 and task.answer_length == 4
    prompt, worth = (3, 1, 2, 6), task.rewarded
    assert worth(prompt, (1, 2, 3, 7)) == 1.0 and task.is_right(prompt, (1, 2, 3, 7))
    assert worth(prompt, (1, 2, 3, 3)) == 0.375 and not task.is_right(prompt, (1, 2, 3, 3))
    assert worth(prompt, (1, 3, 2, 7)) == 0.25
    assert worth(prompt, (7,)) == 0.0
    assert not task.is_right(prompt, (1, 2, 3))


def test_held_out_prompts_are_a_fifth_and_none_is_trained_on():
    task = sort_digits()
    assert (len(task.prompts), len(task.held_out)) == (173, 43)
    assert not set(task.prompts) & set(task.held_out)
    assert {prompt[-1] for prompt in task.prompts} == {6}
    # Most of their digits, in another order, are trained on: what is asked is to sort.
    seen = {tuple(sorted(prompt)) for prompt in task.prompts}
    assert sum(tuple(sorted(prompt)) in seen for prompt in task.held_out) > 30


def test_a_task_of_ones_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    assert load_task(f"{path}:good").rewarded((1, 2), (5, 7)) == 2.0
    for name, found in (("not_a_number", "nan"), ("a_word", "'good'")):
        with pytest.raises(
            DataError, match=rf"reward of \[5, 7\] for the prompt \[1, 2\] is {found}"
        ):
            load_task(f"{path}:{name}").rewarded((1, 2), (5, 7))
    with pytest.raises(ValueError, match="nothing returned None; return a minimegatron"):
        load_task(f"{path}:nothing")
    with pytest.raises(ValueError, match="'sort' is unknown; use sort_digits, or FILE.py:FUNCTION"):
        load_task("sort")
