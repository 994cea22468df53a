"""Puts a training step on several CUDA streams: record, transform, time, plan, race, capture, prove.

docs/streams-design.md describes each stage.
"""
