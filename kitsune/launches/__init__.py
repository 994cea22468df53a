"""The launches of a step on several streams: record, transform, plan, time, prove, capture."""
