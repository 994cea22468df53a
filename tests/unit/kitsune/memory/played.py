"""Streams, played on the host: they run nothing, but know who waited for whom."""

import contextlib
from collections import defaultdict

from kitsune.memory.order import Mark


class PlayedOrder:
    """Each stream knows how far it, and those that it waited for, have come."""

    def __init__(self):
        self.stream = "a"
        self.capturing = set()
        self.clocks = defaultdict(lambda: defaultdict(int))
        self.held = []
        self.waits = []
        self.worked = []  # the points of what was issued in blocks of `on`

    def work(self):
        """The current stream does something; gives the point in its work."""
        self.clocks[self.stream][self.stream] += 1
        return self.stream, self.clocks[self.stream][self.stream]

    def knows(self, stream, point):
        return self.clocks[stream][point[0]] >= point[1]

    def current(self):
        return self.stream

    def new_stream(self):
        return "new"

    @contextlib.contextmanager
    def on(self, stream):
        before, self.stream = self.stream, stream
        yield
        self.worked.append(self.work())
        self.stream = before

    def mark(self, streams):
        return tuple(Mark(stream, dict(self.clocks[stream])) for stream in dict.fromkeys(streams))

    def wait(self, stream, marks):
        for mark in marks:
            if mark.stream != stream:
                self.waits.append((stream, mark.stream))
                for other, count in mark.event.items():
                    self.clocks[stream][other] = max(self.clocks[stream][other], count)

    def hold(self, tensor, stream):
        self.held.append((tensor.data_ptr(), stream))

    def is_capturing(self, stream):
        return stream in self.capturing
