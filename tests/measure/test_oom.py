import pytest

from mla_bench.measure.oom import OutOfMemory, parse_oom
from mla_bench.units import GIB


def understood(message) -> OutOfMemory:
    oom = parse_oom(message)
    assert oom is not None
    return oom


@pytest.mark.parametrize(
    ("words", "needed", "allowed", "memory"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
            "required for HLO temporaries (49.26G) exceeds available HBM (31.24G). HLO module: jit_x.\n"
            "See https://x for more.",
            49.26,
            31.24,
            "HBM",
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 33.27G of 30.75G hbm. "
            "Exceeded hbm capacity by 2.52G.",
            33.27,
            30.75,
            "HBM",
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Requires 3.47E, has 14.49G",
            3.47 * 2**30,
            14.49,
            "HBM",
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack. "
            "Used 20.00M of 16.00M vmem.",
            20 / 1024,
            16 / 1024,
            "vmem",
        ),
    ],
)
def test_the_compilers_words_are_taken_apart(words, needed, allowed, memory):
    oom = understood(words)
    assert oom.needed_bytes == pytest.approx(needed * GIB, rel=1e-9)
    assert oom.allowed_bytes == pytest.approx(allowed * GIB, rel=1e-9)
    assert oom.memory == memory
    assert "\n" not in oom.words


def test_the_line_that_says_it_is_kept():
    oom = understood(
        "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem "
        "while allocating on stack for %fusion. Scoped allocation with size 4.0K and limit 1.0K exceeded "
        "scoped vmem limit by 3.0K.\nSee https://x"
    )
    assert (oom.needed_bytes, oom.allowed_bytes, oom.memory) == (4096, 1024, "vmem")
    assert oom.words.startswith("Ran out of memory in memory space vmem while allocating on stack")


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes.", 2**36),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 64.00GiB.\nBufferAssignment", 2**36),
        (
            "RESOURCE_EXHAUSTED: Failed to allocate request for 176.00MiB (184549376B) on device ordinal 0",
            176 << 20,
        ),
    ],
)
def test_a_devices_words_say_what_was_asked_for(words, needed):
    oom = understood(words)
    assert (oom.needed_bytes, oom.allowed_bytes, oom.memory) == (needed, None, "HBM")


def test_words_without_figures_are_still_out_of_memory():
    oom = understood("RESOURCE_EXHAUSTED: Ran out of memory on HBM.")
    assert (oom.needed_bytes, oom.allowed_bytes, oom.memory) == (None, None, "HBM")


@pytest.mark.parametrize(
    "words",
    [
        "INVALID_ARGUMENT: No such compile option: 'nonsense'",
        "RESOURCE_EXHAUSTED: the lockfile /tmp/libtpu_lockfile is held by another process",
        "",
    ],
)
def test_other_errors_are_not_out_of_memory(words):
    assert parse_oom(words) is None
