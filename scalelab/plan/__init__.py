"""Formulas and published figures, each with its source."""
