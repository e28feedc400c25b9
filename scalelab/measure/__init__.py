"""Measuring a cluster, and keeping what was measured with its machine and date."""
