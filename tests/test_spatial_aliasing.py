"""What is written where, and seen where: copies that stand for views, lists, layouts that all ranks must share."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks

import halotile
from halotile.comm import Ranks, run_virtual
from halotile.errors import UnsupportedError
from halotile.spatial import SpatialTensor
from halotile.spatial.mode import SpatialMode


def numbered(height=7):
    return torch.arange(4.0 * height * 5).view(1, 4, height, 5)


def on_ranks(n, work, height=7, inference=False):
    """What `work` made of sharded rows on each of n virtual ranks, whole."""

    def one(transport):
        with torch.inference_mode() if inference else torch.no_grad():
            x = SpatialTensor.shard(numbered(height), Ranks(transport))
            with SpatialMode(x.ledger):
                out = work(x)
            return out.full() if isinstance(out, SpatialTensor) else out

    return run_virtual(n, one, timeout_s=20)


COPIED_VIEWS = {
    "select": lambda x: x[:, :, 0],
    "squeezed row": lambda x: x[:, :, 2:3].squeeze(2),
    "rows that changed hands": lambda x: x.view(1, 4, -1, 10),
    "unbind": lambda x: x.unbind(2)[1],
    "diagonal": lambda x: x.diagonal(0, 2, 3),
    "unfold": lambda x: x.unfold(2, 3, 1),
}


@pytest.mark.parametrize("name", COPIED_VIEWS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_copied_view_is_not_used_after_its_tensor_was_written_to(name, ranks):
    def work(x):
        view = COPIED_VIEWS[name](x)
        x.add_(1)
        return view * 1

    with pytest.raises(UnsupportedError, match="after the tensor was written to"):
        on_ranks(ranks, work, height=6)


def test_a_view_taken_after_the_write_is_right():
    def work(x):
        before = x[:, :, 0] * 1
        x.add_(1)
        return x[:, :, 0] - before

    for out in on_ranks(3, work):
        assert torch.equal(out, torch.ones(1, 4, 5))


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.view(-1, 5)[1:3].zero_(),
        lambda y: y.flatten(1)[:, ::3].zero_(),
        lambda y: y.view(-1, 5).chunk(3)[1].mul_(3),
    ],
)
def test_a_write_through_a_slice_across_blocks_is_refused_and_not_lost(write):
    with pytest.raises(UnsupportedError, match="would not reach the tensor"):
        on_ranks(2, lambda x: write(x.clone()))


def test_lists_are_written_to():
    def work(x):
        y, z = x.clone(), torch.zeros_like(x)
        torch._foreach_mul_([y], 2.0)
        torch._foreach_copy_([z], [x])
        return y - z

    for out in on_ranks(3, work):
        assert torch.equal(out, numbered())


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("height", [2, 3, 7])
def test_reshape_copies_where_one_rank_copies(inference, height):
    def work(x):
        y = x.transpose(1, 2).reshape(1, 4 * height, 5)
        y.add_(1)
        z = x[:, :, 1:].reshape(1, -1)
        z.mul_(2)
        return x * 1

    for out in on_ranks(2, work, height, inference):
        assert torch.equal(out, numbered(height))


@pytest.mark.parametrize("height", [1, 7])
def test_one_row_is_broadcast_along_the_sharded_dim(height):
    plain = torch.arange(5.0).view(5, 1)
    for out in on_ranks(3, lambda x: x[:, :, :1] + plain, height):
        assert torch.equal(out, numbered(height)[:, :, :1] + plain)
    for out in on_ranks(3, lambda x: torch.where(x[:, :, :1] > 2, plain, -plain), height):
        assert torch.equal(out, torch.where(numbered(height)[:, :, :1] > 2, plain, -plain))


def _permuted_and_gathered(group, height):
    x = SpatialTensor.shard(numbered(height), Ranks.of(group, 20))
    y = x.permute(0, 2, 3, 1).index_fill(1, torch.tensor([0]), 0.0).permute(0, 3, 1, 2)
    return y.stride(), y.is_contiguous(), y.reshape(1, 4, -1).clone()


@pytest.mark.parametrize(("n", "height"), [(2, 3), (4, 3), (4, 11)])
def test_what_is_gathered_has_one_layout_on_all_ranks(n, height):
    results = run_ranks(_permuted_and_gathered, n, height)
    for stride, contiguous, values in results:
        assert (stride, contiguous) == results[0][:2]
        assert torch.equal(values, results[0][2])


class _Returns(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def decode(self, x):
        return self.make(x + 1)


def _outputs(group):
    x = numbered()
    with torch.no_grad():
        whole = halotile.decode(_Returns(lambda y: {"sample": y}), x, group, strategy="shard")
        with pytest.raises(UnsupportedError, match="SimpleNamespace"):
            halotile.decode(_Returns(lambda y: SimpleNamespace(sample=y)), x, group, strategy="shard")
        model = _Returns(lambda y: (y, y.argmax(1), y.mean()))
        with halotile.parallelize(model, group, strategy="shard", deliver="sharded", halves=("decode",)) as handle:
            rows, which, mean = model.decode(x)
        extents = handle.report.extents
    return whole, rows, which, mean, extents


def test_outputs_of_many_kinds():
    results = run_ranks(_outputs, 2)
    expected = numbered() + 1
    for whole, _, which, mean, extents in results:
        assert torch.equal(whole, expected)
        assert which.dtype == torch.int64
        assert extents == (4, 3)
        torch.testing.assert_close(mean, expected.mean())  # a sum in another order
    assert torch.equal(torch.cat([rows for _, rows, *_ in results], 2), expected)


class _Keeps(torch.nn.Module):
    """Keeps activations in nested containers, and where halotile cannot find them."""

    hidden = SimpleNamespace()

    def __init__(self):
        super().__init__()
        self.nested, self.ordered = [[None]], OrderedDict()

    def decode(self, x):
        self.nested[0][0], self.ordered["a"] = x * 1, x * 2
        _Keeps.hidden.x = x * 3
        return x + 1


def _kept(group):
    model = _Keeps()
    with torch.no_grad():
        halotile.decode(model, numbered(), group, strategy="shard")
        with pytest.raises(UnsupportedError, match="a call that is over"):
            _Keeps.hidden.x + 1
    return model.nested, dict(model.ordered)


def test_what_a_model_keeps_is_put_back_or_refused():
    assert run_ranks(_kept, 2) == [([[None]], {})] * 2
