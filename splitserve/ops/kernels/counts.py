"""Sizes of grids and tiles, as launchers work them out: plain Python.

Triton's own functions of these names serve kernels too, and take 7 us of the host for each call, of which launchers of
one layer make 70.
"""


def cdiv(number: int, size: int) -> int:
    """How many of `size` hold `number`."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`; 0 for 0."""
    return 1 << (number - 1).bit_length() if number else 0
