"""How the CPU engine's threads wait for each other."""

from __future__ import annotations

import os

__all__ = ["wait_passively"]


def wait_passively() -> None:
    """Sets how OpenMP's threads wait, unless the user did; torch reads it when first imported.

    Threads that spin while they wait stop each other as soon as anything else runs on the machine:
    50 times slower beside two busy processes on two cores. But to sleep at once costs tens of
    microseconds for each of a step's thousand operations: a short spin first (GNU's libgomp) takes
    a quarter off a short step, and harms nobody.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
