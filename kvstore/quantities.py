"""Bytes, times and file modes as people write them: `64GiB`, `30m`, `0600`."""

from __future__ import annotations

import math
import re

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_BYTE_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": GIB << 10}
_BYTE_UNITS |= {
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": GIB << 10,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SECOND_UNITS = {
    "": 1.0,
    "ms": 0.001,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 604800.0,
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: object) -> int:
    """Return bytes from an integer or a text such as `64GiB` (powers of two; `GB` is a power of ten).

    Errors: ValueError saying what is accepted.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    unit = _BYTE_UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ValueError("expected bytes, such as 1073741824, 64GiB or 512MiB")
    return round(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit


def parse_seconds(value: object) -> float:
    """Return seconds from a number or a text such as `30m`, `3d` or `forever`.

    Errors: ValueError saying what is accepted.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and value.strip().lower() == "forever":
        return math.inf
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    unit = _SECOND_UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ValueError("expected a time, such as 90, 500ms, 30m, 3d or forever")
    return float(found[1]) * unit


def parse_mode(value: object) -> int:
    """Return a file mode from octal text such as `0600`.

    Errors: ValueError saying what is accepted; a decimal 600 is refused, it would mean something else.
    """
    if isinstance(value, str) and re.fullmatch(r"(0o)?[0-7]{3,4}", value):
        value = int(value.removeprefix("0o"), 8)
    if isinstance(value, bool) or not isinstance(value, int) or not 0o600 <= value <= 0o777:
        raise ValueError('expected an octal file mode in text, "0600" to "0777"')
    return value


def parse_port(value: object) -> str:
    """Return a TCP port, `next` or `off` as text.

    Errors: ValueError saying what is accepted.
    """
    text = str(value)
    if text not in ("next", "off") and not (re.fullmatch(r"[0-9]{1,5}", text) and 0 < int(text) < 65536):
        raise ValueError("expected a port (1 to 65535), next or off")
    return text
