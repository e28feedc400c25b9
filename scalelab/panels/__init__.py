"""Panels: what a lesson shows with buttons, and runs without them under papermill."""

from scalelab.panels.run import RunFailed, RunPanel

__all__ = ["RunFailed", "RunPanel"]
