"""Preflight of a cluster (`examine`), and readers that turn what other tools print into facts and
a verdict (`read`)."""

from .examine import examine, parse_endpoint
from .registry import Finding, Host, NotChecked, Seen, check, fail, ok, probe, skip, warn
from .report import Report

__all__ = [
    "Finding", "Host", "NotChecked", "Report", "Seen", "check", "examine", "fail", "ok",
    "parse_endpoint", "probe", "skip", "warn",
]  # fmt: skip
