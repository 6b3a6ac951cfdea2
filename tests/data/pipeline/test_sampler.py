"""Shapes: N images, B images a batch, W ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskfleet.data.pipeline.sampler import (
    Cursor,
    PlannedBatch,
    RankStream,
    TrainOrder,
    cursor_from,
    evaluation_batches,
    image_seed,
    order_group,
)
from maskfleet.errors import TrainingError

bucket_lists = st.lists(st.integers(0, 3), min_size=1, max_size=70).map(np.array)
batch_sizes, worlds, groups, passes = st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 4)


def planned_of_pass(order: TrainOrder, pass_index: int) -> list[PlannedBatch]:
    first = pass_index * order.batches_per_pass
    return [order.batch(number) for number in range(first, first + order.batches_per_pass)]


def images_of(planned: list[PlannedBatch]) -> list[int]:
    return [image for batch in planned for image in batch.images]


@given(bucket_lists, batch_sizes, groups, passes)
def test_a_pass_shows_every_image_once_in_whole_batches_of_one_bucket(
    buckets: np.ndarray, batch: int, group: int, pass_index: int
) -> None:
    order = TrainOrder(buckets, images_per_batch=batch, seed=1, group=group)
    planned = planned_of_pass(order, pass_index)
    firsts = [i for p in planned for i, copy in zip(p.images, p.copies, strict=True) if copy == 0]
    assert sorted(firsts) == list(range(len(buckets)))
    assert all(len(p.images) == batch for p in planned)
    assert all(buckets[image] == p.bucket for p in planned for image in p.images)
    assert all(p.pass_index == pass_index for p in planned)


@given(bucket_lists, batch_sizes)
def test_repeats_only_fill_the_last_batch_of_a_bucket(buckets: np.ndarray, batch: int) -> None:
    order = TrainOrder(buckets, images_per_batch=batch, seed=1)
    missing = sum(-count % batch for count in np.bincount(buckets))
    assert order.batches_per_pass * batch - order.num_images == missing
    shown = Counter(
        (image, copy) for p in planned_of_pass(order, 0) for image, copy in zip(p.images, p.copies, strict=True)
    )
    assert set(shown.values()) == {1}, "a repeat has a number of its own, so that it is augmented differently"


@given(bucket_lists, batch_sizes, worlds, groups)
def test_all_ranks_together_take_the_stream_in_order_and_each_has_a_batch_at_every_step(
    buckets: np.ndarray, batch: int, world: int, group: int
) -> None:
    order = TrainOrder(buckets, images_per_batch=batch, seed=3, group=group)
    ranks = [RankStream(order, rank=rank, world_size=world) for rank in range(world)]
    steps = ranks[0].steps_per_pass
    taken = [stream.planned(step) for step in range(steps) for stream in ranks]
    assert taken == [order.batch(number) for number in range(steps * world)]
    assert set(images_of(taken[: order.batches_per_pass])) == set(range(len(buckets)))


def test_the_order_depends_on_the_pass_and_the_seed() -> None:
    buckets = np.zeros(50, int)
    orders = [TrainOrder(buckets, images_per_batch=2, seed=seed) for seed in (1, 2)]
    first, second = (images_of(planned_of_pass(orders[0], index)) for index in (0, 1))
    assert first != second
    assert first != images_of(planned_of_pass(orders[1], 0))
    assert sorted(first) == sorted(second)


@given(bucket_lists, batch_sizes, st.integers(0, 200))
def test_any_batch_can_be_asked_for_first(buckets: np.ndarray, batch: int, number: int) -> None:
    fresh = TrainOrder(buckets, images_per_batch=batch, seed=4)
    walked = TrainOrder(buckets, images_per_batch=batch, seed=4)
    for earlier in range(0, number, 7):
        walked.batch(earlier)
    assert fresh.batch(number) == walked.batch(number)


@given(bucket_lists, worlds, worlds, st.integers(1, 30), batch_sizes)
def test_a_run_that_resumes_with_other_ranks_loses_and_repeats_nothing(
    buckets: np.ndarray, before: int, after: int, step: int, batch: int
) -> None:
    order = TrainOrder(buckets, images_per_batch=batch, seed=5, group=before)
    old = [RankStream(order, rank=rank, world_size=before) for rank in range(before)]
    saved = cursor_from(old[0].cursor(step).as_dict())
    assert saved.batch * saved.images_per_batch == step * before * batch
    group = order_group({1, 2}, after, saved, batch)
    new_order = TrainOrder(buckets, images_per_batch=batch, seed=5, group=group)
    new = [RankStream(new_order, rank=rank, world_size=after, start=saved) for rank in range(after)]
    taken = [s.planned(n) for n in range(step) for s in old] + [
        s.planned(n) for n in range(step, step + 9) for s in new
    ]
    assert taken == [order.batch(number) for number in range(len(taken))]
    assert new[0].cursor(step + 9).batch == len(taken)


def test_with_another_batch_size_a_run_resumes_after_as_many_images_of_the_pass() -> None:
    buckets = np.zeros(40, int)
    saved = Cursor(step=15, batch=15, images_per_batch=4, group=1, batches_per_pass=10)
    stream = RankStream(TrainOrder(buckets, images_per_batch=2, seed=0), rank=0, world_size=1, start=saved)
    assert stream.cursor(15).batch == 20 + 10  # a pass has 20 batches of 2; in the next one 5 batches of 4 = 10 of 2
    assert stream.cursor(16).batch == 20 + 11


def test_ranks_share_a_bucket_at_every_step_but_where_one_runs_out() -> None:
    buckets = np.array([0] * 37 + [1] * 22 + [2] * 9)
    world = 4
    order = TrainOrder(buckets, images_per_batch=1, seed=0, group=world)
    ranks = [RankStream(order, rank=rank, world_size=world) for rank in range(world)]
    mixed = sum(len({stream.planned(step).bucket for stream in ranks}) > 1 for step in range(17 * 5))
    # A pass of 68 = 17 steps has 37 % 4 + 22 % 4 + 9 % 4 = 4 loose batches: one mixed step each.
    assert mixed == 5


def test_ranks_share_a_bucket_when_passes_end_inside_a_step() -> None:
    buckets = np.array([0] * 41 + [1] * 26)
    order = TrainOrder(buckets, images_per_batch=1, seed=0, group=4)
    ranks = [RankStream(order, rank=rank, world_size=4) for rank in range(4)]
    steps = 67  # four passes of 67 batches
    mixed = sum(len({stream.planned(step).bucket for stream in ranks}) > 1 for step in range(steps))
    assert mixed <= 8, "at most two steps a pass, where it begins and where it ends"


def test_canvases_of_one_area_are_shuffled_freely() -> None:
    assert order_group({800 * 1344}, 8, None, 2) == 1
    assert order_group({800 * 1344, 800 * 1088}, 8, None, 2) == 8


def test_a_step_before_the_resumed_one_is_refused() -> None:
    order = TrainOrder(np.zeros(4, int), images_per_batch=1, seed=0)
    stream = RankStream(order, rank=0, world_size=1, start=Cursor(7, 7, 1, 1, 4))
    with pytest.raises(TrainingError, match="step 6 is before step 7"):
        stream.planned(6)


@pytest.mark.parametrize("change", [{"batch": -1}, {"group": 0}, {"step": "3"}, {"more": 1}, {"batch": None}])
def test_a_damaged_position_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(TrainingError, match="is not valid"):
        cursor_from(Cursor(1, 2, 3, 1, 5).as_dict() | change)


@given(bucket_lists, batch_sizes, worlds)
def test_evaluation_takes_every_image_once_over_all_ranks(buckets: np.ndarray, batch: int, world: int) -> None:
    shares = [evaluation_batches(buckets, images_per_batch=batch, rank=rank, world_size=world) for rank in range(world)]
    assert sorted(image for share in shares for image in images_of(share)) == list(range(len(buckets)))
    for share in shares:
        assert [planned.bucket for planned in share] == sorted(planned.bucket for planned in share)
        assert all(buckets[image] == planned.bucket for planned in share for image in planned.images)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_an_image_seed_is_stable_and_depends_on_every_argument() -> None:
    base = (1234, 0, 0, 139, 0)
    others = [tuple(value + (index == part) for index, value in enumerate(base)) for part in range(5)]
    drawn = [image_seed(*values) for values in (base, *others, (1234, 0, 0, -5, 0))]
    assert len(set(drawn)) == 7
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert image_seed(*base) == 250668375911930785, "another number would change every resumed run"
