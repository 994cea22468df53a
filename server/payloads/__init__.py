"""Schemas of requests and answers, and problem details (RFC 9457)."""
