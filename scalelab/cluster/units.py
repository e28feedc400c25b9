"""Words for link settings and sizes ("1gbit", "5ms", "0.1%", "64M") to numbers.

Every parser raises ValueError with one line: what is wrong and what is accepted.
Rates are in bits per second with decimal prefixes (1 gbit = 10**9 bits), as network
equipment counts; sizes are in bytes with binary prefixes (1K = 1024), as nccl-tests counts.
"""

import math
import re

_NUMBER_UNIT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z%]*)", re.ASCII)

_RATE = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_DELAY = {"us": 10**6, "ms": 10**3, "s": 1}  # in a second
_SIZE = {"": 1, "b": 1}
for _power, _letter in enumerate("kmg", start=1):
    _SIZE.update(dict.fromkeys((_letter, _letter + "b", _letter + "ib"), 1024**_power))

# Below 10 kbit one full frame takes more than a second; above 1 tbit no machine follows.
RATE_MIN, RATE_MAX = 10**4, 10**12
DELAY_MAX = 10.0
SIZE_MAX = 2**40
MTU_MIN, MTU_MAX = 68, 65535  # IPv4 asks for 68 at least; veth takes no more than 65535

_RATE_OK = 'accepted: a number with kbit, mbit or gbit, from 10kbit to 1tbit, or "unlimited"'
_DELAY_OK = "accepted: a number with us, ms or s, from 0ms to 10s"
_LOSS_OK = "accepted: a percentage from 0% to 100%, such as 0.1%"
_SIZE_OK = "accepted: whole bytes, or a number with K, M or G (1K = 1024 bytes)"
_MTU_OK = f"accepted: a whole number of bytes from {MTU_MIN} to {MTU_MAX}"


def _show(text) -> str:
    """What was given, short enough for one line."""
    shown = repr(text if isinstance(text, str) else str(text))
    return shown if len(shown) <= 40 else shown[:36] + "...'"


def _split(what: str, text, accepted: str) -> tuple[float, str]:
    """(number, unit in lower case) of a string such as "2.5gbit"."""
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise ValueError(f"{what} {_show(text)}: expected a string; {accepted}")
    found = _NUMBER_UNIT.fullmatch(str(text).strip())
    if not found:
        raise ValueError(f"{what} {_show(text)}: not a number with a unit; {accepted}")
    value = float(found[1])
    if not math.isfinite(value):
        raise ValueError(f"{what} {_show(text)}: too large; {accepted}")
    return value, found[2].lower()


def parse_rate(text) -> int | None:
    """Bits per second; None for None or "unlimited" (no shaping)."""
    if text is None or (isinstance(text, str) and text.strip().lower() == "unlimited"):
        return None
    value, unit = _split("rate", text, _RATE_OK)
    if unit not in _RATE:
        problem = f"unknown unit {unit!r}" if unit else "zero" if value == 0 else "no unit"
        raise ValueError(f"rate {_show(text)}: {problem}; {_RATE_OK}")
    bits = value * _RATE[unit]
    if not RATE_MIN <= bits <= RATE_MAX:
        problem = "zero" if bits == 0 else "too small" if bits < RATE_MIN else "too large"
        raise ValueError(f"rate {_show(text)}: {problem}; {_RATE_OK}")
    return round(bits)


def parse_delay(text, *, what: str = "delay") -> float:
    """Seconds, one way. None and plain 0 mean none; any other number needs a unit."""
    if text is None:
        return 0.0
    value, unit = _split(what, text, _DELAY_OK)
    if unit == "" and value == 0:
        return 0.0
    if unit not in _DELAY:
        problem = f"unknown unit {unit!r}" if unit else "no unit"
        raise ValueError(f"{what} {_show(text)}: {problem}; {_DELAY_OK}")
    seconds = value / _DELAY[unit]
    if seconds > DELAY_MAX:
        raise ValueError(f"{what} {_show(text)}: too large; {_DELAY_OK}")
    return seconds


def parse_loss(text) -> float:
    """Fraction from 0 to 1. None and plain 0 mean none; any other number needs a %."""
    if text is None:
        return 0.0
    value, unit = _split("loss", text, _LOSS_OK)
    if unit == "" and value == 0:
        return 0.0
    if unit != "%":
        problem = f"unknown unit {unit!r}" if unit else "no %"
        raise ValueError(f"loss {_show(text)}: {problem}; {_LOSS_OK}")
    if value > 100:
        raise ValueError(f"loss {_show(text)}: more than everything; {_LOSS_OK}")
    return value / 100


def parse_size(text) -> int:
    """Bytes. K, M and G are 1024-based (4K = 4096), with or without B or iB behind."""
    value, unit = _split("size", text, _SIZE_OK)
    if unit not in _SIZE:
        raise ValueError(f"size {_show(text)}: unknown unit {unit!r}; {_SIZE_OK}")
    size = value * _SIZE[unit]
    if size != int(size):
        raise ValueError(f"size {_show(text)}: not whole bytes; {_SIZE_OK}")
    if not 1 <= size <= SIZE_MAX:
        raise ValueError(f"size {_show(text)}: outside 1 byte to 1024G; {_SIZE_OK}")
    return int(size)


def parse_mtu(text, *, what: str = "mtu") -> int:
    """Bytes of the largest IP packet (Ethernet's 14 bytes not counted)."""
    value, unit = _split(what, text, _MTU_OK)
    if unit or value != int(value) or not MTU_MIN <= value <= MTU_MAX:
        raise ValueError(f"{what} {_show(text)}: {_MTU_OK}")
    return int(value)
