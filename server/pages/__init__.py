"""Requests of browsers in, pages out: HTML by Jinja2 and htmx that reads as well without JavaScript."""
