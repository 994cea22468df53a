"""Transforms of a recording that keep its results and let more of its launches run side by side."""
