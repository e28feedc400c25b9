"""The catalogue of faults, in the order of lesson 05's five pits."""

from __future__ import annotations

from ..cluster import UsageError
from .fault import Fault
from .launch import LAUNCH
from .network import NETWORK
from .settings import CHECKPOINT, ENVIRONMENT
from .storage import STORAGE

FAULTS: tuple[Fault, ...] = (*STORAGE, *NETWORK, *ENVIRONMENT, *LAUNCH, *CHECKPOINT)


def by_id(name: str) -> Fault:
    """The fault of this id. Raises UsageError if there is none."""
    for fault in FAULTS:
        if fault.id == name:
            return fault
    raise UsageError(f"fault {name!r}: use one of {', '.join(f.id for f in FAULTS)}")
