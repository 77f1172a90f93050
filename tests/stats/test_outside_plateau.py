"""Memory read from outside: healthy processes whose allocator fills its free list, and leaks."""

from __future__ import annotations

import numpy as np
import pytest

from runbook.stats.decision import Decided, Decision
from runbook.stats.memory import memory_plateau, outside_plateau

# Two ranks of a plain DistributedDataParallel script on CPUs, MiB together, as measured. The bytes
# in use kept level, and malloc_trim(0) gave all of the rise back.
SHORT = """
5 891 15 896 25 896 35 897 45 898 55 900 65 900 75 903 85 902 95 906 105 905 115 904 125 906 135 905
145 906 155 909 165 909 175 908 185 910 195 910 205 912 215 912 225 917 235 919 245 919 275 924
300 929 325 931 350 935 375 936 395 942 415 947 435 954 455 959 475 965 490 963 505 971 520 975
535 979 550 982 570 986 585 993 600 994 615 992
"""
LONGER = """
5 894 30 893 55 894 80 894 105 895 130 898 155 899 180 898 225 902 275 908 320 910 365 911 415 920
455 927 495 931 535 938 575 959 625 969 675 988 725 1014 770 1021 815 1038 865 1063 910 1082
955 1099 1005 1118 1050 1125 1090 1132 1140 1143 1185 1149 1235 1159 1280 1170 1320 1174 1370 1185
1425 1192 1475 1198 1520 1212 1565 1214 1610 1223 1655 1229 1700 1234 1745 1243 1795 1246 1845 1248
1890 1248 1940 1249 1990 1249
"""
LEVEL_AT_LAST = """
5 895 70 898 135 897 200 900 265 903 330 895 395 904 510 899 665 914 830 930 995 939 1165 943
1360 951 1545 964 1695 964 1825 964 1960 965 2100 965 2225 965 2335 968 2500 968 2645 966 2780 996
2935 1059 3075 1104 3225 1154 3345 1211 3460 1256 3580 1298 3710 1364 3860 1385 4015 1385 4150 1385
4270 1385 4400 1385 4535 1385 4645 1385 4755 1385 4900 1372 5035 1372 5155 1372 5290 1372 5420 1372
5545 1372 5675 1372 5820 1372 5945 1358
"""
# With glibc's threshold at 64 KiB: what each of two ranks keeps of every step, 64 KiB.
KEPT = " ".join(f"{step} {round(634.5 + 0.137 * step)}" for step in range(10, 800, 10))


def of(measured: str) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(measured.split(), dtype=float).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def judged(measured: str, limit: float = 16_384.0) -> Decision:
    return outside_plateau(*of(measured), 50_000, limit)


@pytest.mark.parametrize(
    ("measured", "outcome"),
    [(SHORT, "INCONCLUSIVE"), (LONGER, "INCONCLUSIVE"), (LEVEL_AT_LAST, "PASS"),
     (KEPT, "INCONCLUSIVE")],
)  # fmt: skip
def test_what_may_be_an_allocator_is_no_leak_and_what_became_level_is_none(
    measured: str, outcome: str
) -> None:
    assert memory_plateau(*of(measured), 50_000, 16_384).outcome is Decided.FAIL
    found = judged(measured)
    assert found.outcome is Decided[outcome], found.reason
    words = "level in the last quarter" if outcome == "PASS" else "a leak looks so, and an alloc"
    assert words in found.reason


@pytest.mark.parametrize("measured", [SHORT, LONGER, LEVEL_AT_LAST])
def test_no_beginning_of_a_healthy_run_fails(measured: str) -> None:
    steps, mib = of(measured)
    for rows in range(40, len(steps) + 1):
        assert outside_plateau(steps[:rows], mib[:rows], 50_000, 16_384).outcome is not Decided.FAIL


@pytest.mark.parametrize(
    ("per_step", "outcome"), [(1.0, "INCONCLUSIVE"), (1.6, "FAIL"), (8.0, "FAIL")]
)
def test_what_doubled_and_goes_on_is_a_leak(per_step: float, outcome: str) -> None:
    """900 MiB at first: 1.0 MiB a step leads to 1.7 times that, 1.6 MiB to more than twice."""
    steps = np.arange(1.0, 628.0)
    found = outside_plateau(steps, 900 + per_step * steps, 50_000, 1e9)
    assert found.outcome is Decided[outcome], found.reason
    # One that slows down, or ended, has not been shown to go on.
    slower = 900 + 16 * per_step * np.sqrt(steps * 6)
    assert slower[-1] > 1_800
    assert outside_plateau(steps, slower, 50_000, 1e9).outcome is not Decided.PASS
    ended = 900 + per_step * np.minimum(steps * 3, 900)
    assert outside_plateau(steps, ended, 50_000, 1e9).outcome is Decided.PASS


def test_a_limit_that_is_passed_is_passed() -> None:
    assert "were already used" in judged(SHORT, limit=990).reason
    assert judged(SHORT, limit=990).outcome is Decided.FAIL
    # Level at last, and yet it may come to the limit.
    steps = np.arange(1.0, 1001.0)
    level = 900 + 0.5 * np.clip(steps - 300, 0, 400)
    assert outside_plateau(steps, level, 50_000, 30_000).outcome is Decided.PASS
    assert outside_plateau(steps, level, 50_000, 2_000).outcome is Decided.INCONCLUSIVE
