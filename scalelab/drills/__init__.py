"""Faults that are put into emulated hosts for real, to be seen, found and mended."""

from .fault import Fault, Lab
from .faults import FAULTS, by_id

__all__ = ["FAULTS", "Fault", "Lab", "by_id"]
