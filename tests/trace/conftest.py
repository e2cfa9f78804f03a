import pytest

from tests.ranks import run_ranks
from tests.trace import recordings


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory):
    """1F1B, p=3, M=4, two steps, paced: the folder and what rank 0 had in memory."""
    folder = tmp_path_factory.mktemp("plain")
    traces = run_ranks(recordings.record, 3, str(folder), 3, 4, None, False, 2, True)
    return folder, traces[0]


@pytest.fixture(scope="session")
def plain(plain_folder):
    return plain_folder[1]


@pytest.fixture(scope="session")
def interleaved(tmp_path_factory):
    """Interleaved 1F1B with overlap, p=2, v=2, M=4, one step, not paced."""
    folder = tmp_path_factory.mktemp("interleaved")
    return run_ranks(recordings.record, 2, str(folder), 2, 4, 2, True, 1, False)[0]
