"""The paper's own model: 28 printed speedups, and where its sums disagree."""

from __future__ import annotations

import dataclasses

import pytest

from hvd8bit.speedup import paper

# As printed in the appendix of Dettmers 2016, typed anew: 32 and 8 bit.
NODE = {"NervanaGPU": (3.53, 3.67), "convnet2": (3.71, 3.80)}
CLUSTER = {
    128: ((13.4, 13.8), (20.7, 21.4)),
    256: ((20, 24.4), (29.7, 35.2)),
    512: ((23, 39.3), (33.5, 51.9)),
    1024: ((14.8, 48.6), (22.7, 61)),
    2048: ((11.3, 50.6), (17.7, 62.8)),
    12288: ((1.3, 9.7), (2.15, 15.5)),
}
FULL = {  # ms, 32 and 8 bit
    128: (24.8, 0.35),
    256: (89.9, 0.55),
    512: (181, 1.13),
    1024: (499, 29.5),
    2048: (750, 60.8),
}


def test_there_are_28_rows():
    rows = paper.rows()
    assert len(rows) == len({(row.kernels, row.sub_batch, row.bits) for row in rows}) == 28
    assert [row.gpus for row in rows] == [4] * 4 + [96] * 24


@pytest.mark.parametrize("row", paper.rows(), ids=lambda row: f"{row.kernels}-{row.sub_batch}-{row.bits}")
def test_every_printed_speedup_is_reproduced(row):
    which = (32, 8).index(row.bits)
    if row.sub_batch is None:
        printed = NODE[row.kernels][which]
    else:
        printed = CLUSTER[row.sub_batch][paper.KERNELS.index(row.kernels)][which]
    assert row.printed == printed
    assert row.holds
    assert abs(row.speedup - printed) <= max(0.01 * printed, 0.5 * 10**-row.decimals)


def test_a_row_that_is_off_does_not_hold():
    row = paper.rows()[0]
    assert not dataclasses.replace(row, speedup=row.printed * 1.02).holds
    assert dataclasses.replace(row, speedup=1.27, printed=1.3, decimals=1).holds, "1.27 is printed as 1.3"


@pytest.mark.parametrize(("size", "printed"), FULL.items())
def test_what_sticks_out_of_the_exchanges(size, printed):
    for bits, value in zip((32, 8), printed):
        assert paper.full_ms(size, bits) == pytest.approx(value, rel=0.005)


def test_the_largest_sub_batch_takes_the_printed_estimate():
    """The paper's 7750 ms, and not what its formula gives: 7709.7 ms."""
    by_print, by_formula = (paper.on_cluster("convnet2", 12288, 32, printed_full=p) for p in (None, False))
    assert by_print == pytest.approx(96 * 177 / (177 - 6.5 + 6.5 + 7750))
    assert by_formula == pytest.approx(96 * 177 / (177 - 6.5 + 6.5 + 7709.7))


def test_measured_by_krizhevsky():
    assert paper.measured() == (3.66, "Krizhevsky 2014, 4 GPUs, convnet2 kernels, 32 bit")


def test_where_the_papers_sums_disagree():
    total, penalty, full = paper.disagreements()
    assert (total.printed, total.recomputed) == (104.1, pytest.approx(94.5))
    assert (penalty.printed, penalty.recomputed) == (6.81, pytest.approx(7.01))
    assert (full.printed, full.recomputed) == (7750, pytest.approx(31 * (250 - 1.3)))
    assert paper.fc_penalty_ms(8) == pytest.approx(2.55), "this sum is right in the paper"


def test_unknown_sub_batch_is_an_error():
    with pytest.raises(ValueError, match="sub_batch must be one of 128, 256, 512, 1024, 2048, 12288, got 64"):
        paper.on_cluster("NervanaGPU", 64, 32)
