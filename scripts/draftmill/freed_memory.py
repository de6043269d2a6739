"""Memory that was freed, given back to the system."""

import ctypes


def give_back() -> None:
    """Lets glibc return freed memory (other C libraries do so by themselves): the many sources of a layer's
    experts leave holes in the heap that would add up to a seventh of the layer."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
