"""Throughput under a false clock: what is counted, what is not, and when an impossible figure is called one."""

import pytest

from jaxpar.metrics import Throughput


def _meter(**changes):
    return Throughput(**({"tokens_per_step": 1000, "flops_per_token": 6.0, "peak_flops_total": 12_000.0} | changes))


def test_no_figure_before_two_synchronised_steps():
    meter = _meter()
    assert meter.take() is None
    meter.synchronised(1, 50.0)
    assert meter.take() is None
    meter.synchronised(2, 51.0)
    assert meter.take().tokens_per_second == 1000.0
    assert meter.take() is None, "no new step since"


def test_compiling_first_step_is_never_counted():
    meter = _meter()
    meter.synchronised(1, 300.0)
    meter.synchronised(2, 302.0)
    meter.synchronised(5, 308.0)
    assert meter.take().step_seconds == 2.0


def test_take_averages_since_the_last_take():
    meter = _meter()
    for step, now in ((1, 0.0), (2, 1.0), (3, 2.0)):
        meter.synchronised(step, now)
    assert meter.take().values() == {"tokens_per_second": 1000.0, "step_seconds": 1.0, "mfu": 0.5}
    meter.synchronised(4, 6.0)
    assert meter.take().values() == {"tokens_per_second": 250.0, "step_seconds": 4.0, "mfu": 0.125}


def test_no_mfu_without_flops_or_peak():
    for meter in (_meter(flops_per_token=None), _meter(peak_flops_total=None)):
        meter.synchronised(1, 0.0)
        meter.synchronised(2, 1.0)
        assert meter.take().values() == {"tokens_per_second": 1000.0, "step_seconds": 1.0}


def test_pause_is_excluded():
    meter = _meter()
    meter.synchronised(1, 10.0)
    meter.synchronised(2, 11.0)
    meter.pause(2, 11.5)
    meter.resume(100.0)
    meter.synchronised(3, 100.5)
    rates = meter.take()
    assert rates.step_seconds == 1.0, "the pause is left out, the half seconds around it are not"
    meter.pause(3, 101.0)
    meter.resume(201.0)
    meter.synchronised(4, 202.0)
    assert meter.take().step_seconds == 1.5


def test_pause_before_the_first_step_is_allowed():
    meter = _meter()
    meter.pause(0, 1.0)
    meter.resume(9.0)
    meter.synchronised(1, 20.0)
    meter.synchronised(2, 22.0)
    assert meter.take().step_seconds == 2.0


def test_impossible_utilisation_warns_once_and_names_what_may_be_wrong():
    """The public report: 2,400 TFLOP/s on a chip whose peak is 459, from timing the dispatch of steps."""
    meter = Throughput(tokens_per_step=1_000_000, flops_per_token=2.4e9, peak_flops_total=459e12)
    for step in range(1, 5):
        meter.synchronised(step, float(step))
    rates = meter.take()
    assert rates.mfu == pytest.approx(2400 / 459)
    assert rates.warning.startswith("MFU is 523%: 2,400 TFLOP/s, above the 459 TFLOP/s that all devices together")
    assert "hardware.peak_tflops" in rates.warning
    assert "without waiting for their results" in rates.warning
    meter.synchronised(5, 5.0)
    again = meter.take()
    assert again.mfu == pytest.approx(2400 / 459)
    assert again.warning is None


def test_full_utilisation_does_not_warn():
    meter = _meter(peak_flops_total=6000.0)
    meter.synchronised(1, 0.0)
    meter.synchronised(2, 1.0)
    rates = meter.take()
    assert (rates.mfu, rates.warning) == (1.0, None)


def test_a_step_in_flight_during_a_pause_is_refused():
    meter = _meter()
    meter.synchronised(1, 1.0)
    with pytest.raises(
        ValueError, match=r"step 2 is dispatched but step 1 is the last one synchronised; fetch a value"
    ):
        meter.pause(2, 2.0)


def test_misuse_is_refused():
    meter = _meter()
    with pytest.raises(ValueError, match="the meter is not paused"):
        meter.resume(0.0)
    meter.synchronised(3, 1.0)
    with pytest.raises(ValueError, match="step 3 was synchronised after step 3; steps must increase"):
        meter.synchronised(3, 2.0)
    with pytest.raises(ValueError, match=r"time ran backwards, from 1.0 s to 0.5 s"):
        meter.synchronised(4, 0.5)
    meter.pause(3, 2.0)
    with pytest.raises(ValueError, match="the meter is paused already"):
        meter.pause(3, 3.0)
    with pytest.raises(ValueError, match="step 4 was synchronised while the meter is paused"):
        meter.synchronised(4, 3.0)


def test_clock_that_stands_still_gives_no_figure():
    meter = _meter()
    meter.synchronised(1, 1.0)
    meter.synchronised(2, 1.0)
    assert meter.take() is None
    meter.synchronised(3, 2.0)
    assert meter.take().step_seconds == 0.5
