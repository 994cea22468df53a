"""Decisions of a tuning run: which configuration to try next, and what still fits into the budget. Pure functions."""
