"""Step time: a compiled function called again and again on the device, each call waited for."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_FEWEST, _MOST = 5, 500
# Half of the median's 95% interval, 1.57 × interquartile range / √n (McGill, Tukey and Larsen, 1978).
_NOTCH, _STEADY = 1.57, 0.01
_NOISY = 0.1


@dataclass(frozen=True)
class Steps:
    """Seconds of each timed step, in order."""

    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Middle of the samples."""
        return statistics.median(self.samples_s)

    @property
    def iqr_s(self) -> float:
        """Interquartile range of the samples; 0 for a single one."""
        if len(self.samples_s) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return third - first

    @property
    def is_steady(self) -> bool:
        """Whether more samples would move the median by less than one part in a hundred."""
        count = len(self.samples_s)
        return count >= _FEWEST and _NOTCH * self.iqr_s / count**0.5 <= _STEADY * self.median_s

    @property
    def warning(self) -> str:
        """What a reader must know of the samples' spread; empty where there is nothing."""
        count = len(self.samples_s)
        if count < _FEWEST:
            return f"step time of {count} step{'s' if count > 1 else ''} alone: the time for it was spent"
        spread = self.iqr_s / self.median_s
        if spread > _NOISY:
            return f"noisy: the middle half of {count} step times spreads over {spread:.0%} of their median"
        return ""


def time_steps(step: Callable[..., Any], arguments: Iterator[tuple[Any, ...]], budget_s: float) -> Steps:
    """Times calls of `step`, each with the next of `arguments`, until their median is steady.

    The first call is not timed, and each call waits for its arguments before and for its results after.

    Args:
      step: a compiled function; nothing is compiled here.
      arguments: arrays for one call after another. What a call donates is not in a later one.
      budget_s: seconds after which no more steps are begun. One at least is timed.
    """
    import jax

    begun, samples = time.perf_counter(), []
    jax.block_until_ready(step(*next(arguments)))
    while True:
        ready = jax.block_until_ready(next(arguments))
        start = time.perf_counter()
        jax.block_until_ready(step(*ready))
        samples.append(time.perf_counter() - start)
        found = Steps(tuple(samples))
        spent = time.perf_counter() - begun
        if spent > budget_s or len(samples) >= _MOST or found.is_steady:
            return found
