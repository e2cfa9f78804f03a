"""A reader who follows one microbatch opens few files; a message's way to the wire is short."""

from tests.figures import figure
from tests.ranks import has_shared_memory, run_ranks
from tests.step_files import MOST_FILES, MOST_PLUMBING, WAY, plumbing, to_read, watch_a_step


def test_a_step_enters_few_files_and_a_message_takes_the_short_way():
    ranks = run_ranks(watch_a_step, 2)
    files = to_read(ranks)
    if not has_shared_memory():  # then messages go over gloo, another way
        return
    figure(f"{len(files)} files, {len(plumbing(files))} of them plumbing")
    assert len(plumbing(files)) <= MOST_PLUMBING, plumbing(files)
    assert len(files) <= MOST_FILES, files
    ways = [way for _, of_rank in ranks for way in of_rank]
    assert len(ways) == 8  # four activations, four gradients
    for way in ways:
        assert way[1:] == WAY and way[0].startswith(("send_", "recv_")), way
