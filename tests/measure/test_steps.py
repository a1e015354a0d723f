"""Timed steps: what is in a sample, what is not, and when enough are taken."""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_bench.measure.steps import Steps, time_steps


def sleeping(seconds):
    """A compiled function that takes `seconds`, on the CPU, by a callback."""

    def sleep(x):
        time.sleep(seconds)
        return x

    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    return jax.jit(lambda x: jax.pure_callback(sleep, shape, x)).lower(shape).compile()


def arrays():
    for number in itertools.count():
        yield (jnp.full((4,), number, jnp.float32),)


def test_a_step_of_50_ms_reads_50_ms_and_the_warm_up_is_not_in_it():
    step, calls = sleeping(0.05), []

    def counted(x):
        calls.append(float(x[0]))
        if len(calls) == 1:
            time.sleep(0.5)
        return step(x)

    found = time_steps(counted, arrays(), budget_s=5)
    assert 0.05 <= found.median_s <= 0.06
    assert max(found.samples_s) < 0.5
    assert len(calls) == len(found.samples_s) + 1
    assert calls == sorted(set(calls)), "each call has arguments of its own"


def test_each_step_waits_for_its_result():
    # Case 10: dispatch alone would read far below 200 ms.
    found = time_steps(sleeping(0.2), arrays(), budget_s=0.5)
    assert min(found.samples_s) >= 0.2


def test_the_budget_ends_it_with_one_sample_at_least():
    found = time_steps(sleeping(0.1), arrays(), budget_s=0.01)
    assert len(found.samples_s) == 1
    assert found.iqr_s == 0
    assert found.warning == "step time of 1 step alone: the time for it was spent"


def test_a_steady_median_ends_it_early():
    assert len(time_steps(sleeping(0.02), arrays(), budget_s=60).samples_s) < 100


def test_median_and_interquartile_range_are_those_of_numpy():
    samples = tuple(np.random.default_rng(1).gamma(2.0, 0.01, 37))
    found = Steps(samples)
    assert found.median_s == pytest.approx(np.median(samples))
    assert found.iqr_s == pytest.approx(np.subtract(*np.percentile(samples, [75, 25])))


def test_noise_is_said_in_plain_words():
    assert "noisy: the middle half of 6 step times spreads over" in Steps((1, 1, 1, 2, 2, 2)).warning
    assert not Steps((1.0, 1.01, 1.0, 1.01, 1.0, 1.0)).warning
