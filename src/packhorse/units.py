"""Quantities as people write and read them: `2GiB`, `500MB`."""

import re

from packhorse.errors import PackhorseError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str | int) -> int:
    """Bytes from a number with a unit; a plain number is bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if not match or match[2].upper() not in _UNITS:
        raise PackhorseError(
            f"{text!r} is no amount of memory; write a number with a unit, such as 2GiB, 500MB or 4096"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_rate(text: str | float) -> float:
    """Bytes a second from a number with a unit of bytes or bits; a plain number is bytes."""
    if not isinstance(text, str):
        return float(text)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(bit|b/s|bit/s|bps)\s*", text)
    if match:
        return float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[match[2].upper()] / 8
    try:
        return float(parse_bytes(text.removesuffix("/s")))
    except PackhorseError:
        raise PackhorseError(
            f"{text!r} is no rate; write a number with a unit, such as 1Gbit, 200Mbit or 100MB (a second)"
        ) from None


def format_seconds(seconds: float) -> str:
    for limit, unit, scale in ((1e-3, "us", 1e6), (1.0, "ms", 1e3), (120.0, "s", 1.0), (7200.0, "min", 1 / 60)):
        if seconds < limit:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds / 3600:.1f} h"


def format_bytes(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
