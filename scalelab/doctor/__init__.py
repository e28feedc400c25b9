"""Preflight and readers: what other tools print, turned into facts and a verdict."""
