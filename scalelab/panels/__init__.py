"""Panels: what a lesson shows with buttons, and runs without them under papermill."""

from scalelab.panels.bandwidth import BandwidthPanel
from scalelab.panels.base import RunFailed
from scalelab.panels.pits import PitsPanel
from scalelab.panels.progress import draw_progress
from scalelab.panels.run import RunPanel

__all__ = ["BandwidthPanel", "PitsPanel", "RunFailed", "RunPanel", "draw_progress"]
