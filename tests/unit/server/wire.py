"""A client below HTTP, which sends and receives single ASGI messages."""

import asyncio


class Wire:
    """Sends the ASGI messages of a test."""

    def __init__(self, app, *headers: tuple[str, str], method: str = "POST", path: str = "/api/v1/runs") -> None:
        self.app = app
        self.sent = []
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(n.lower().encode(), v.encode()) for n, v in (("host", "localhost"), *headers)],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "state": {},
        }

    async def note(self, message) -> None:
        self.sent.append(message)

    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    def answer(self, receive) -> tuple[int, dict[str, str], str]:
        """Status, headers and body of the answer; `receive` returns the next message of the client."""
        asyncio.run(asyncio.wait_for(self.app(self.scope, receive, self.note), 60))
        start = self.sent[0]
        return start["status"], {n.decode(): v.decode() for n, v in start["headers"]}, self.text()
