"""CRC-32 of concatenated bytes from the CRC-32 of each part."""

from __future__ import annotations

import functools

# Of zlib and zip, bits reversed: the highest bit is the coefficient of x**0.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def crc32_combine(first: int, second: int, length: int) -> int:
    """Return `zlib.crc32(a + b)` from `zlib.crc32(a)`, `zlib.crc32(b)` and `len(b)`.

    As zlib's function of this name does.

    >>> import zlib
    >>> crc32_combine(zlib.crc32(b"check"), zlib.crc32(b"point"), 5) == zlib.crc32(b"checkpoint")
    True
    """
    return _times(_power_of_x(8 * length), first) ^ second


@functools.lru_cache(maxsize=1024)
def _power_of_x(exponent: int) -> int:
    """Return x ** exponent modulo the polynomial."""
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _times(square, power)
        square, exponent = _times(square, square), exponent >> 1
    return power


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
