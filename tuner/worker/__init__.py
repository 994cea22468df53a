"""Runs of the queue, claimed and carried out."""
