"""`halotile.verify`: what counts as equal, and what is said where it is not."""

import math

import pytest
import torch

from halotile.verify import compare, keeps_promise, psnr_db


def picture(seed: int = 0) -> torch.Tensor:
    return torch.rand(1, 3, 6, 4, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def test_equal_pictures_are_bitwise_equal() -> None:
    found = compare(picture(), picture())
    assert found.bitwise
    assert (found.max_error, found.psnr_db, found.first_differing_row, found.differing) == (0, math.inf, None, 0)


@pytest.mark.parametrize("shape", [(1, 3, 6, 4), (1, 3, 5, 6, 4)])
def test_one_changed_value_is_found_by_its_row(shape: tuple[int, ...]) -> None:
    reference = torch.zeros(shape)
    result = reference.clone()
    result[..., 4, 1] = 0.5
    result[..., 5, 0] = -0.25
    found = compare(result, reference)
    assert not found.bitwise
    assert (found.max_error, found.first_differing_row) == (0.5, 4)
    assert found.differing == 2 * math.prod(shape[:-2])


def test_psnr_is_that_of_the_definition() -> None:
    # an error of 0.2 everywhere on a range of 2: 10 log10(4 / 0.04) = 20 dB
    assert psnr_db(torch.full((1, 3, 2, 2), 0.2), torch.zeros(1, 3, 2, 2)) == pytest.approx(20.0, abs=1e-5)
    assert psnr_db(torch.full((2,), 10.0), torch.zeros(2), peak=255) == pytest.approx(28.1308, abs=1e-4)
    assert psnr_db(picture(), picture()) == math.inf


def test_not_a_number_equals_itself_and_nothing_else() -> None:
    broken = picture()
    broken[0, 0, 2, 2] = math.nan
    assert compare(broken, broken.clone()).bitwise
    found = compare(broken, picture())
    assert (found.bitwise, found.first_differing_row, found.differing) == (False, 2, 1)


def test_the_smallest_difference_breaks_bitwise_equality() -> None:
    result = picture()
    result[0, 0, 3, 0] = torch.nextafter(result[0, 0, 3, 0], torch.tensor(2.0))
    found = compare(result, picture())
    assert (found.bitwise, found.first_differing_row, found.differing) == (False, 3, 1)
    assert 0 < found.max_error < 1e-6


def test_other_shapes_and_dtypes_are_never_equal() -> None:
    cut = compare(picture()[..., :-1, :], picture())
    assert (cut.bitwise, cut.max_error, cut.psnr_db, cut.first_differing_row) == (False, math.inf, -math.inf, 0)
    assert (cut.shape, cut.reference_shape) == ((1, 3, 5, 4), (1, 3, 6, 4))
    assert not compare(torch.zeros(1, 3, 2, 2), torch.zeros(1, 3, 2, 2, dtype=torch.float64)).bitwise


def test_tile_and_serial_promise_the_same_bits() -> None:
    equal, different = compare(picture(), picture()), compare(picture(), picture(1))
    for strategy in ("tile", "serial"):
        assert keeps_promise(equal, strategy)
        assert not keeps_promise(different, strategy)
    with pytest.raises(ValueError, match="no promise is known of strategy 'magic'"):
        keeps_promise(equal, "magic")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1), (torch.float64, 1e-10)])
def test_shard_promises_rounding_as_a_part_of_the_largest_value(dtype: torch.dtype, tolerance: float) -> None:
    reference = torch.zeros(1, 1, 4, 4, dtype=dtype)
    reference[..., 0, 0] = -8.0
    for part, kept in ((0.9, True), (1.1, False)):
        result = reference.clone()
        result[..., 2, 2] = 8.0 * tolerance * part
        assert keeps_promise(compare(result, reference), "shard") == kept
    assert keeps_promise(compare(reference, reference), "shard")
    assert not keeps_promise(compare(reference[..., 1:], reference), "shard")
