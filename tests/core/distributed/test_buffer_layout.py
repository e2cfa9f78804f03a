"""Where parameters and buckets lie: arithmetic, no processes."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.core.distributed.buffer_layout import lay_out_buffer


def test_reverse_order_and_bucket_size():
    layout = lay_out_buffer([10, 20, 30, 40], [False] * 4, bucket_size=50)
    # Last parameter first; 40 alone is below 50, 40 + 30 is not.
    assert layout.params == [(90, 100, 1), (70, 90, 1), (40, 70, 0), (0, 40, 0)]
    assert layout.buckets == [(0, 70), (70, 100)]
    assert layout.numel == 100


def test_one_bucket_without_a_size():
    layout = lay_out_buffer([10, 20, 30], [False] * 3, bucket_size=None)
    assert layout.buckets == [(0, 60)]


def test_the_tied_embedding_is_alone_wherever_it_stands():
    for position in range(3):
        alone = [i == position for i in range(3)]
        layout = lay_out_buffer([100, 100, 100], alone, bucket_size=None, num_shards=2)
        bucket_id = layout.params[position][2]
        assert [b for _, _, b in layout.params].count(bucket_id) == 1
        # At the same place within its bucket as on the other stage.
        assert layout.params[position][0] == layout.buckets[bucket_id][0]


def test_the_tied_embedding_has_equal_shards_on_first_and_last_stage():
    # It comes first in the first stage's module order, last in the last stage's.
    first = lay_out_buffer([333, 50, 60], [True, False, False], None, num_shards=4)
    last = lay_out_buffer([70, 80, 333], [False, False, True], None, num_shards=4)
    sizes = []
    for layout, i in ((first, 0), (last, 2)):
        start, end = layout.buckets[layout.params[i][2]]
        sizes.append(end - start)
    assert sizes == [384, 384]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=20),
    st.one_of(st.none(), st.integers(1, 6000)),
    st.one_of(st.none(), st.integers(1, 7)),
)
def test_layout_invariants(params, bucket_size, num_shards):
    numels = [numel for numel, _ in params]
    alone = [own and num_shards is not None for _, own in params]
    layout = lay_out_buffer(numels, alone, bucket_size, num_shards)
    # Buckets follow each other without gaps, from 0.
    assert layout.buckets[0][0] == 0
    for (_, end), (start, _) in zip(layout.buckets, layout.buckets[1:], strict=False):
        assert end == start
    # Each parameter is whole, inside its bucket, and none overlaps the next.
    places = sorted(layout.params)
    for (start, end, bucket_id), numel in zip(layout.params, numels, strict=True):
        bucket_start, bucket_end = layout.buckets[bucket_id]
        assert end - start == numel and bucket_start <= start and end <= bucket_end
    for (_, end, _), (start, _, _) in zip(places, places[1:], strict=False):
        assert end <= start
    assert places == layout.params[::-1]
    if num_shards is None:
        assert layout.numel == sum(numels)
        return
    assert all(start % 64 == 0 for start, _, _ in layout.params)
    for start, end in layout.buckets:
        assert (end - start) % math.lcm(num_shards, 128) == 0
    for i, own in enumerate(alone):
        if own:
            assert [b for _, _, b in layout.params].count(layout.params[i][2]) == 1
