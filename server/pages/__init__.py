"""The web pages: HTML by Jinja2 with htmx; every page also works without JavaScript."""
