"""What a page says of a story."""

from server.pages.views.run_view import RunView, run_view
from tests.unit.server.pages import stories
from tests.unit.server.pages.stories import Story

SERVER = "http://localhost:8537"


def viewed(story: Story, server: str | None = SERVER, seconds: float = 300) -> RunView:
    return run_view(*story, stories.at(seconds), server)
