"""Elements of sharded tensors picked and written by indices, against one rank."""

import functools

import pytest
import torch
import torch.nn.functional as F
from on_sharded import GUARDS, filled, on_sharded, uneven

from halotile.spatial import SpatialTensor

SIZES = (1, 2, 3, 4)
SHAPE = (2, 3, 7, 5)


def _check(work, shape=SHAPE, dim=-2, gathers=None, dtype=torch.float32, kind="virtual", sizes=SIZES, guards=GUARDS):
    """`work` on a sharded tensor is bitwise `work` on a plain one, and gathers nothing, or what is said."""
    x = filled(*shape, dtype=dtype)
    expected = work(x.clone())
    for n in sizes:
        for extents in (None, uneven(shape[dim], n)):
            for guard in sorted(guards):
                out, counted = on_sharded(kind, n, x, dim, work, extents, guard)
                assert counted == (gathers or {}), counted
                for got, want in zip(*((v if isinstance(v, tuple) else (v,)) for v in (out, expected)), strict=True):
                    assert got.dtype == want.dtype
                    assert torch.equal(got, want), n


def _set(x, index, value):
    x[index] = value
    return x


VALUE = filled(2, 3, 7, 5, seed=1)
MASK = VALUE > 0.3


@pytest.mark.parametrize(
    ("index", "value"),
    [
        ((slice(None), slice(None), 3), 2.0),
        ((slice(None), slice(None), -1), VALUE[:, :, 0]),
        ((slice(None), slice(None), 3, slice(1, 4)), VALUE[0, 0, 0, :3]),
        ((1, slice(None), 3), VALUE[0, :, 0]),
        ((..., 2, slice(None)), VALUE[:, :1, 0]),
        ((..., 2, 1), VALUE[:, :, 0, 0]),
        ((..., None, 2, slice(None)), VALUE[:, :, :1]),
        ((slice(None), 1, slice(2, 6)), VALUE[:, 0, 2:6]),
        ((slice(None), slice(None), slice(2, 6)), VALUE[:, :, 1:5].to(torch.float64)),
        ((slice(None), slice(None), slice(1, None, 3)), VALUE[:, :, :1]),
        ((Ellipsis,), 1.5),
        (0, VALUE[0, 0]),
        ((slice(None), torch.tensor([2, 0])), VALUE[:, :2]),
        ((slice(None), [0, 1], slice(None), torch.tensor([2, 0])), VALUE[0, :2, :]),
        ((torch.tensor([1]), slice(None), slice(None), torch.tensor([2, 0])), 0.0),
        (MASK, -1.0),
        ((slice(None), slice(None), MASK[0, 0]), 3.0),
        ((0, MASK[0]), 3.0),
    ],
)
def test_assignments_reach_the_owners_memory(index, value):
    if isinstance(index, tuple) and isinstance(index[0], torch.Tensor):
        # two index tensors that are not side by side
        value = filled(2, 3, 7, seed=2)
    elif isinstance(index, tuple) and len(index) == 4 and isinstance(index[1], list):
        value = filled(2, 2, 7, seed=2)
    _check(functools.partial(_set, index=index, value=value))


def _assign_sharded(x):
    y = x * 2
    x[:, :, 1:5] = y[:, :, 3:7]
    x[:, 0, :, 1] = y[:, 1, :, 2]
    x[..., 0:2] = y[:, :1, :, 1:3]
    x[:, :, 4] = y[:, :, 2:3].sum(2) if not isinstance(y, SpatialTensor) else y[:, :, 2:3].full().sum(2)
    x[:] = x + 1
    return x


def test_assignments_of_sharded_values():
    _check(_assign_sharded)
    _check(_assign_sharded, kind="gloo", sizes=(2, 4), guards=["inference_mode"])


def _row_and_indices(x):
    x[torch.tensor([1]), :, 3, torch.tensor([2])] = 5.0
    return x


def test_a_row_number_between_index_tensors_is_gathered_and_right():
    _check(_row_and_indices, gathers={"__setitem__": 1}, sizes=(3,))


def test_a_row_that_is_not_there_is_an_index_error():
    with pytest.raises(IndexError, match="out of bounds"):
        on_sharded("virtual", 2, filled(*SHAPE), 2, functools.partial(_set, index=(0, 0, 7), value=1.0))


INDEX = torch.tensor([2, 0, 2, 1])
PICKS = {
    "channels": lambda x: x[:, INDEX],
    "columns": lambda x: x[..., INDEX],
    "columns_2d": lambda x: x[..., INDEX.view(2, 2)],
    "channels_2d": lambda x: x[:, INDEX.view(2, 2)],
    "apart_2d": lambda x: x[torch.tensor([[1], [0]]), :, :, torch.tensor([3, 4])],
    "apart": lambda x: x[torch.tensor([1, 0]), :, :, torch.tensor([3, 4])],
    "side_by_side": lambda x: x[torch.tensor([[1], [0]]), torch.tensor([2, 1])],
    "mask_of_columns": lambda x: x[..., torch.tensor([True, False, True, True, False])],
    "mask_of_batch_and_channels": lambda x: x[torch.tensor([[True, False, True], [False, False, True]])],
    "rows": lambda x: x[:, :, torch.tensor([6, -7, 2, 2, 5])],
    "select_channels": lambda x: x.index_select(1, INDEX),
    "select_rows": lambda x: x.index_select(2, torch.tensor([3, 3, 6, 0])),
    "select_no_rows": lambda x: x.index_select(2, torch.tensor([], dtype=torch.int64)),
    "gather_columns": lambda x: x.gather(3, (VALUE * 100).long() % 5),
    "gather_channels_sharded": lambda x: x.gather(1, (x * 100).long() % 3),
    "take_along": lambda x: torch.take_along_dim(x, x.argsort(dim=-1), dim=-1),
    "plain_by_sharded": lambda x: VALUE[1, 1, :, 0][(x * 100).long() % 7],
    "plain_by_two": lambda x: VALUE[:, (x * 100).long() % 3, :, (x[:, :1] * 100).long() % 5],
    "plain_gather": lambda x: VALUE.gather(2, (x * 100).long() % 7),
    "plain_gather_beside": lambda x: VALUE.gather(1, (x * 100).long() % 3),
    "plain_select": lambda x: VALUE.index_select(1, (x[0, 0, :, 0] * 100).long() % 3),
    "embedding": lambda x: F.embedding((x * 100).long() % 7, VALUE[0, 0]),
    "where": lambda x: torch.where(x > 0, x, 0.0) + torch.where(MASK, x, VALUE),
    "masked_fill": lambda x: x.masked_fill(MASK, 2.0) + x.masked_fill(x > 0, torch.tensor(3.0)),
}


@pytest.mark.parametrize("name", PICKS)
def test_picks_equal_one_rank(name):
    _check(PICKS[name])


FALLBACKS = {
    "mask": (lambda x: x[MASK], {"aten.index.Tensor": 1}),
    "gather_rows": (lambda x: x.gather(2, (VALUE * 100).long() % 7), {"aten.gather.default": 1}),
    "rows_and_columns": (lambda x: x[:, :, torch.tensor([0, 6]), torch.tensor([1, 2])], {"aten.index.Tensor": 1}),
    "put_rows": (
        lambda x: _set(x, (slice(None), slice(None), torch.tensor([5, 0])), 2.0),
        {"aten.index_put_.default": 1},
    ),
    "copy_rows": (lambda x: x.index_copy_(2, torch.tensor([5, 0]), VALUE[:, :, :2]), {"aten.index_copy_.default": 1}),
    "into_plain": (lambda x: VALUE.clone().copy_(x), {"aten.copy_.default": 1}),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_what_is_gathered_is_right_and_counted(name):
    work, gathers = FALLBACKS[name]
    _check(work, gathers=gathers, sizes=(1, 3))


ONES = torch.ones(2, 3, 7, 5)
WRITES = {
    "index_put": lambda x: x.index_put((torch.tensor([1, 0]),), VALUE),
    "index_put_accumulate": lambda x: x.index_put_((torch.tensor([1, 1]),), VALUE, accumulate=True),
    "index_put_sharded_value": lambda x: x.index_put_((torch.tensor([1, 0]),), x * 2),
    "index_copy": lambda x: x.index_copy_(1, torch.tensor([2, 0]), VALUE[:, :2]),
    "index_add": lambda x: x.index_add_(1, torch.tensor([2, 2]), VALUE[:, :2], alpha=2),
    "index_add_sharded": lambda x: x.index_add(3, torch.tensor([1, 2, 1, 0, 3]), x),
    "index_fill": lambda x: x.index_fill_(3, torch.tensor([1, 2]), 7.0),
    "scatter": lambda x: x.scatter(1, (VALUE * 100).long() % 3, ONES),
    "scatter_value": lambda x: x.scatter_(3, (x * 100).long() % 5, 4.0),
    "scatter_add": lambda x: x.scatter_add_(1, (x * 100).long() % 3, ONES),
    "scatter_reduce": lambda x: x.scatter_reduce(1, (x * 100).long() % 3, x, "amax"),
    "masked_fill": lambda x: x.masked_fill_(MASK, 2.0).masked_fill_(x < 0, 3.0),
    "fill": lambda x: x[:, :, 2:4].fill_(3.0) * 2,
    "zero": lambda x: x[:, 1:2].zero_() + x,
    "copy": lambda x: x.copy_(VALUE),
    "copy_broadcast": lambda x: x.copy_(VALUE[0, :, :1]),
    "copy_dtype": lambda x: x.copy_(VALUE.to(torch.bfloat16)),
    "copy_sharded_dtype": lambda x: torch.zeros_like(x, dtype=torch.float64).copy_(x),
    "copy_between_layouts": lambda x: x[:, :, :3].copy_(x[:, :, 4:]) + x[:, :, :3],
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_equal_one_rank(name, dtype):
    if dtype == torch.bfloat16 and not name.startswith(("copy", "fill", "zero", "masked")):
        # source and target must have one dtype
        return
    _check(WRITES[name], dtype=dtype)


def _identities(x):
    y = x[:, :, 1:5]
    same = [
        x.index_put_((torch.tensor([1]),), torch.tensor(1.0)) is x,
        x.fill_(2.0) is x,
        x.copy_(VALUE) is x,
        x.masked_fill_(MASK, 1.0) is x,
        x.scatter_(3, (VALUE * 100).long() % 5, 4.0) is x,
        x.index_copy_(1, torch.tensor([0]), VALUE[:, :1]) is x,
    ]
    # what is written through a view is seen in what it is a view of
    y.fill_(9.0)
    y[:, :, 1] = 8.0
    return torch.tensor(same), x


def test_in_place_operations_return_their_argument_and_write_through_views():
    (same, out), gathers = on_sharded("virtual", 3, filled(*SHAPE), -2, _identities)
    assert same.all()
    expected = _identities(filled(*SHAPE))[1]
    assert torch.equal(out, expected)
    assert (out[:, :, 2] == 8).all()
    assert (out[:, :, 1] == 9).all()
    assert gathers == {}


@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_rows_than_ranks(rows):
    shape = (2, 3, rows, 5)
    value = filled(*shape, seed=1)
    for work in (
        lambda x: _set(x, (slice(None), slice(None), rows - 1), 4.0),
        lambda x: _set(x, (slice(None), slice(0, 2), 0), value[:, :2, 0]),
        lambda x: _set(x, value > 0, 1.0),
        lambda x: x[:, INDEX],
        lambda x: x.index_select(2, torch.tensor([rows - 1, 0, 0, 0, 0])),
        lambda x: x.copy_(value),
    ):
        _check(work, shape, sizes=(4,))
