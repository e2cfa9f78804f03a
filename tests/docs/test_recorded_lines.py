"""A recorded line is found again in edited source; a call that is no longer there is named."""

import importlib

import pytest

recorded_lines = importlib.import_module("player.recorded_lines")
annotate = importlib.import_module("source.annotate").annotate
package = importlib.import_module("source.package")

PATH = "minimegatron/core/steps.py"
SOURCE = '''"""One step."""


def forward(chunk, batch):
    return chunk(batch)


@decorated
def train_step(chunk, batches, optimizer):
    """All of it."""
    for batch in batches:
        loss = forward(chunk, batch)
        loss.backward()
    optimizer.step(closure=None)
    for batch in batches:
        loss = forward(chunk, batch)
    total = loss + 1
    return total


if __name__ == "__main__":
    train_step(None, [], None)
'''
NAME = "minimegatron.core.steps.train_step"
FIRST_LINE = 1 + SOURCE.split("\n").index("@decorated")


def recorded(text: str, name: str = NAME, nth: int = 0):
    """A frame of a run of SOURCE."""
    lines = [line.strip() for line in SOURCE.split("\n")]
    number = [n for n, line in enumerate(lines, 1) if line == text][nth]
    first_line = FIRST_LINE if name == NAME else number
    return recorded_lines.RecordedLine(name, PATH, first_line, number, text)


def find(frame, source: str, path: str = PATH, moved=None, **others: str):
    """Where the frame is in today's source, as (line number, text); its dotted name too."""
    pages = [annotate(path, source), *(annotate(where, text) for where, text in others.items())]
    finder = recorded_lines.Finder(
        package.Package({page.module: page for page in pages}), moved or {}
    )
    found = finder.line(frame)
    return found.line, found.text, finder.name_today(frame.name, frame.path)


def with_lines_above(source: str) -> str:
    return source.replace("@decorated", "X = 1\nY = 2\n\n\n# Of one step.\n@decorated")


@pytest.mark.parametrize("change", [str, with_lines_above], ids=["as it was", "lines above it"])
@pytest.mark.parametrize("nth", [0, 1])
def test_of_two_lines_alike_it_is_the_one_at_its_place(nth, change):
    frame = recorded("loss = forward(chunk, batch)", nth=nth)
    source = change(SOURCE)
    number, text, name = find(frame, source)
    at = [n for n, line in enumerate(source.split("\n"), 1) if line.strip() == frame.text]
    assert (number, text, name) == (at[nth], frame.text, NAME)


EDITED = {
    "an argument": ("optimizer.step(closure=None)", "optimizer.step()"),
    "what is made of it": (
        "optimizer.step(closure=None)",
        "is_done = optimizer.step(closure=None)",
    ),
    "over several lines": ("optimizer.step(closure=None)", "optimizer.step("),
    "another object": ("loss.backward()", "self.scaler.scale(loss).backward()"),
    "no call in it": ("total = loss + 1", "total = loss + 2"),
}


@pytest.mark.parametrize(("old", "new"), EDITED.values(), ids=list(EDITED))
def test_an_edited_line_is_found_by_its_call(old, new):
    source = SOURCE.replace(old, new)
    if new.endswith("("):
        source = source.replace(f"{new}\n", f"{new}\n        closure=None\n    )\n")
    number, text, _ = find(recorded(old), source)
    assert text == new and source.split("\n")[number - 1].strip() == new


def test_of_several_calls_it_is_the_one_most_like_it():
    source = SOURCE.replace(
        "optimizer.step(closure=None)", "optimizer.step(closure=fn)\n    other.step()"
    )
    assert find(recorded("optimizer.step(closure=None)"), source)[1] == "optimizer.step(closure=fn)"


def test_a_call_elsewhere_or_in_words_does_not_count():
    source = SOURCE.replace("optimizer.step(closure=None)", "pass  # optimizer.step()")
    source = source.replace("return chunk(batch)", "optimizer.step(); return chunk(batch)")
    with pytest.raises(
        recorded_lines.Missing, match="train_step: it no longer calls step; line 14"
    ):
        find(recorded("optimizer.step(closure=None)"), source)


def test_a_renamed_function_is_gone():
    source = SOURCE.replace("train_step", "one_step")
    with pytest.raises(recorded_lines.Missing, match="steps.train_step: the function is gone"):
        find(recorded("loss.backward()"), source)


def test_a_line_without_a_call_that_is_like_no_other_is_gone():
    source = SOURCE.replace("    total = loss + 1\n    return total", "    return None")
    with pytest.raises(
        recorded_lines.Missing, match="no line is like the recorded one; line 17 was"
    ):
        find(recorded("total = loss + 1"), source)


def test_a_line_of_the_module_itself():
    name = "minimegatron.core.steps"
    frame = recorded("train_step(None, [], None)", name)
    source = with_lines_above(SOURCE).replace(
        "train_step(None, [], None)", "train_step(1, [], None)"
    )
    assert find(frame, source)[1:] == ("train_step(1, [], None)", name)


def test_in_a_file_that_has_moved():
    today = "minimegatron/training/step.py"
    frame = recorded("loss.backward()")
    with pytest.raises(recorded_lines.Missing, match="train_step: the function is gone"):
        find(frame, SOURCE, today)
    found = find(frame, SOURCE, today, {PATH: today})
    assert found == (frame.line, frame.text, "minimegatron.training.step.train_step")


def test_a_function_that_is_imported_where_it_was():
    other = "minimegatron/core/one_step.py"
    here = '"""Steps."""\n\nfrom minimegatron.core.one_step import train_step\n'
    found = find(recorded("loss.backward()"), here, **{other: SOURCE})
    assert found[1:] == ("loss.backward()", "minimegatron.core.one_step.train_step")


def test_what_is_nested_keeps_its_name():
    source = SOURCE.replace(
        "def forward(chunk, batch):\n", "def forward(chunk, batch):\n    x = 1\n"
    )
    name = "minimegatron.core.steps.forward.<locals>.inner"
    frame = recorded_lines.RecordedLine(name, PATH, 4, 5, "return chunk(batch)")
    assert find(frame, source) == (6, "return chunk(batch)", name)


def test_the_sentences_are_kept_with_the_recording():
    emit = importlib.import_module("player.emit_player")
    sources = [[NAME, PATH, FIRST_LINE], ["minimegatron.core.steps.gone", PATH, 1]]
    data = {
        "sources": sources,
        "frames": [[0, 12, "loss = forward(chunk, batch)"], [0, 13, "loss.sum()"], [1, 2, "x()"]],
        "functions": [["train_step", 0], ["gone", 1]],
        "stacks": [[0, 1, 2]],
    }
    page = annotate(PATH, SOURCE)
    found = emit.resolve(data, package.Package({page.module: page}))
    assert [url for _, url, _ in found["frames"]] == [
        "source/minimegatron.core.steps.html#L12",
        "source/minimegatron.core.steps.html#train_step",
        "",
    ]
    assert found["functions"][1] == ("gone", "", "minimegatron.core.steps.gone")
    assert found["gone"] == [
        f"{NAME}: it no longer calls sum; line 13 was 'loss.sum()'",
        "minimegatron.core.steps.gone: the function is gone",
    ]
