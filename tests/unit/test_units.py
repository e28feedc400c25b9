"""Words to numbers and back; what means nothing is refused in one line."""

import math

import pytest

from scalelab.cluster import units


@pytest.mark.parametrize(
    "text, bits",
    [
        ("1gbit", 10**9),
        ("100mbit", 10**8),
        ("10kbit", 10**4),
        ("2.5gbit", 25 * 10**8),
        (" 1 Gbit ", 10**9),
        ("1tbit", 10**12),
        ("20000bit", 20_000),
        (None, None),
        ("unlimited", None),
    ],
)
def test_rate(text, bits):
    assert units.parse_rate(text) == bits


@pytest.mark.parametrize(
    "text, seconds",
    [("5ms", 0.005), ("200us", 0.0002), ("1s", 1.0), ("0ms", 0.0), ("0", 0.0), (0, 0.0), (None, 0)],
)
def test_delay(text, seconds):
    assert units.parse_delay(text) == seconds


@pytest.mark.parametrize(
    "text, fraction", [("0.1%", 0.001), ("0%", 0.0), ("100%", 1.0), (".5 %", 0.005), (0, 0.0)]
)
def test_loss(text, fraction):
    assert math.isclose(units.parse_loss(text), fraction)


@pytest.mark.parametrize(
    "text, count",
    [("4K", 4096), ("64M", 64 * 2**20), ("1G", 2**30), ("9000", 9000), (9000, 9000), ("1.5k", 1536)]
    + [("4KiB", 4096), ("4kb", 4096), ("7b", 7)],
)
def test_size(text, count):
    assert units.parse_size(text) == count


@pytest.mark.parametrize("text, count", [("1500", 1500), (9000, 9000), (68, 68), ("65535", 65535)])
def test_mtu(text, count):
    assert units.parse_mtu(text) == count


NOT_NUMBERS = ["", " ", "fast", "nan", "inf", "-1", "1e3", "0x10", "1,5", "1 2", float("nan"), True]
NOT_NUMBERS += [float("inf"), -1, [], "٣", "1\n2"]
WRONG = {
    units.parse_rate: ["0", 0, "-1gbit", "1 parsec", "1e400gbit", "0gbit", "1", "100", "1bit"]
    + ["9kbit", "2tbit", "1gbps", "1gb", "9" * 400 + "gbit", "gbit", "1gbit1"],
    units.parse_delay: ["5", 5, 0.005, "-5ms", "5m", "1h", "11s", "9" * 400 + "ms", "ms"],
    units.parse_loss: ["0.1", 0.01, "101%", "-1%", "1%%", "%", "1 percent"],
    units.parse_size: ["0", "-4K", "1.3", "0.3K", "4X", "1T", "9999G", "K", "4K4"],
    units.parse_mtu: ["67", 65536, "1500.5", "9k", "9000 bytes", "1500%"],
}


@pytest.mark.parametrize(
    "parse, value",
    [(parse, value) for parse, values in WRONG.items() for value in [*values, *NOT_NUMBERS]],
)
def test_what_means_nothing_is_refused(parse, value):
    with pytest.raises(ValueError) as e:
        parse(value)
    said = str(e.value)
    assert "accepted: " in said
    assert len(said.splitlines()) == 1 and len(said) < 300
