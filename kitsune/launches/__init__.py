"""Puts a training step on several CUDA streams: record, transform, time, plan, race, prove, capture.

docs/streams-design.md describes each stage.
"""
