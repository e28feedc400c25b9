"""Panels: what a lesson shows with buttons, and runs without them under papermill."""

from scalelab.panels.progress import draw_progress
from scalelab.panels.run import RunFailed, RunPanel

__all__ = ["RunFailed", "RunPanel", "draw_progress"]
