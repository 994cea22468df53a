"""Names that are not ours in: of hosts and pages, on every route and method, and of files, wherever a path has a name.

Every request has a token and a session that may do everything, so that nothing but its names can be what is refused.
"""

import itertools
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from fastapi.routing import iter_route_contexts

from benchmarks.attack_api import filled
from benchmarks.attack_archives import WATCHED, complain
from benchmarks.connections import exchange, status_of
from benchmarks.results_file import Figure
from benchmarks.serving import Serving, serving
from benchmarks.watched import events_since
from server.app import create_app
from server.pages.assets import assets
from server.settings import ServerSettings
from tests.unit.server.http.test_guard import BROKEN_HOSTS, FOREIGN_HOSTS, FOREIGN_ORIGINS, METHODS
from tuner.store.engine import open_database
from tuner.store.queries import sessions, tokens
from tuner.store.queries.tokens import Scope

#: How a folder above is written, by those who hope that it is read more than once, or in another way.
UPWARDS: Final = (
    "../", "..\\", "..%2f", "..%2F", "..%5c", "%2e%2e/", "%2e%2e%2f", "%2e%2e%5c", ".%2e/", "%2e./", "..%252f",
    "%252e%252e%252f", "%25252e%25252e%25252f", "..%255c", "..%c0%af", "%c0%ae%c0%ae/", "%c0%ae%c0%ae%c0%af",
    "..%e0%80%af", "..%f0%80%80%af", "..%c1%9c", "..%u2215", "%u002e%u002e/", "..%ef%bc%8f", "%ef%bc%8e%ef%bc%8e/",
    "..%e2%88%95", "%e2%80%a4%e2%80%a4/", "....//", "...//", "..;/", "..%3b/", "..//", "../%2f", "..%00/", "%00../",
    "..%0d%0a/", "..%09/", "..%20/", "..%2500/", "../\\", "x/../../",
)  # fmt: skip
DEPTHS: Final = (1, 2, 4, 8)
#: From some folder above: of the system, of this server's home, of its code.
FILES: Final = ("etc/passwd", "proc/self/environ", "token", "names.db", "outside.txt", "server/app.py")
WHOLE: Final = (
    "/etc/passwd", "%2fetc%2fpasswd", "%252fetc%252fpasswd", "//etc/passwd", "file:///etc/passwd",
    "file:%2f%2f/etc/passwd", "C:%5cWindows%5cwin.ini", "%5c%5chost%5cshare", "~root/.profile", "/proc/self/fd/3",
    "/dev/stdin", "..", ".", "%2e%2e", "%00", "token%00", "token%00.css", "kitsune.css%00", "kitsune.css/",
    "kitsune.css/../token", "kitsune.css%2f..%2ftoken", "kitsune.css::$DATA", "KITSUNE.CSS", "kitsune.css%20",
    "kitsune.css.", "CON", "*", "%2a", "$HOME", "${HOME}", "`id`", "{{7*7}}", "%7b%7b7*7%7d%7d", "%s%s%s%n",
    "' OR 1=1 --", "%27%20OR%201%3D1", "\\\\?\\C:\\", "http://localhost/", "?", "#",
)  # fmt: skip
#: What only a file outside of the answers of this server holds.
SIGNS: Final = (b"root:x:0:", b"SQLite format 3", b"A database and settings in, the application out", b"KITSUNE_HOME=")


@dataclass
class Asked:
    """How requests were answered; `wrong` holds in words those that should not have been."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Target:
    """A server, and the requests that it would carry out if only the names in them were its own."""

    def __init__(self, server: Serving) -> None:
        self.server = server
        known = filled(server.database)
        with open_database(server.database) as opened:
            with opened.begin() as connection:
                token, self.secret = tokens.create(connection, "attacker", tuple(Scope))
                session, self.cookie = sessions.start(connection, token)
            self.routes = sorted(
                (method, route.path_format)
                for route in iter_route_contexts(create_app(opened, ServerSettings()).routes)
                for method in route.methods or ()
            )
        self.csrf = session.csrf
        name, asset = next(iter(assets().items()))
        self.names = {
            "run_id": known.runs[0],
            "plan_id": known.plans[0],
            "fingerprint": known.fingerprints[0],
            "sha256": known.archives[0],
            "token_id": "0",
            "secret": "0" * 43,
            "digest": asset.digest,
            "name": name,
        }

    @property
    def host(self) -> str:
        return f"{self.server.host}:{self.server.port}"

    def path(self, route: str, **others: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda found: {**self.names, **others}.get(found[1], "0"), route)

    def ask(self, method: str, path: str, names: Iterable[tuple[str, str | bytes]]) -> bytes:
        """`names` are the headers Host and Origin."""
        body = f"csrf={self.csrf}".encode() if method in ("POST", "PUT", "PATCH") else b""
        headers: list[tuple[str, str | bytes]] = [
            *names,
            ("Authorization", f"Bearer {self.secret}"),
            ("Cookie", f"kitsune_session={self.cookie}"),
            ("Content-Type", "application/x-www-form-urlencoded"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        lines = [f"{method} {path} HTTP/1.1".encode("utf-8", "surrogatepass")]
        lines += [
            name.encode() + b": " + (value if isinstance(value, bytes) else value.encode()) for name, value in headers
        ]
        return exchange(self.server.host, self.server.port, b"\r\n".join([*lines, b"", body]))


def attacked(folder: Path, *, traversals: int | None = None, methods: Iterable[str] = METHODS) -> Iterator[Figure]:
    """`traversals`: of each route; all there are without."""
    events = folder / "events"
    marker = secrets.token_hex(16)
    (folder / "outside.txt").write_text(marker)
    with serving(folder, f"sqlite:///{folder}/names.db", (*WATCHED, str(events), "kitsune.__main__:main")) as server:
        target = Target(server)
        signs = (*SIGNS, marker.encode(), server.token.encode(), target.secret.encode())
        yield from outside(target, events, signs, traversals)
        yield from foreign(target, tuple(methods))  # in the end, by our own names, this signs out


# Hosts and origins ----------------------------------------------------------------------------------------------------


def foreign(target: Target, methods: tuple[str, ...]) -> Iterator[Figure]:
    """Refused is what the guard refuses, in its words. Our own names must get past it, or nothing would be shown."""
    paths = sorted({route for _, route in target.routes} | {"/nothing", "/api/v1/nothing"})
    asked = Asked()
    for path, method, names in itertools.product(paths, methods, strangers(target.host)):
        answer = target.ask(method, target.path(path), names)
        asked.statuses[status_of(answer)] += 1
        if not is_refused(answer, method):
            asked.wrong.append(f"{method} {path} with {names}: {answer[:200]!r}")
    complain(asked.wrong)
    count = asked.statuses.total()
    yield from (
        (f"foreign names: answers {status}", number, "answers", count)
        for status, number in sorted(asked.statuses.items())
    )
    yield "foreign names: accepted anyway", len(asked.wrong), "requests", count
    ours = (("Host", target.host), ("Origin", f"http://{target.host}"))
    shut = [is_refused(target.ask(method, target.path(path), ours), method) for method, path in target.routes]
    yield "own names: routes that do not answer", sum(shut), "routes", len(shut)


def strangers(host: str) -> list[tuple[tuple[str, str | bytes], ...]]:
    """A foreign or broken Host, or a foreign Origin beside our own Host."""
    hosts: list[str | bytes] = [*FOREIGN_HOSTS, *BROKEN_HOSTS]
    return [
        *((("Host", name),) for name in hosts),
        *((("Host", host), ("Origin", origin)) for origin in FOREIGN_ORIGINS),
        (),
        (("Host", host), ("Host", "evil.example")),
        (("Host", host), ("Origin", f"http://{host}"), ("Origin", "https://evil.example")),
    ]


def is_refused(answer: bytes, method: str) -> bool:
    status, (_, _, body) = status_of(answer), answer.partition(b"\r\n\r\n")
    reasons: Mapping[int, tuple[bytes, ...]] = {
        400: (b"header Host", b"is not HTTP"),
        403: (b"other origins",),
        421: (b"--allow-host",),
    }
    return status in reasons and (method == "HEAD" or any(reason in body for reason in reasons[status]))


# Files ----------------------------------------------------------------------------------------------------------------


def outside(target: Target, events: Path, signs: tuple[bytes, ...], most: int | None) -> Iterator[Figure]:
    chance, places = Random(0), list(named_places(target.routes))
    for method, route in [("GET", "/"), *target.routes]:  # what is made once, such as templates
        if method == "GET":
            target.ask(method, target.path(route), [("Host", target.host)])
    for place in places:
        ask_for(target, *place, "0")
    warm = events.stat().st_size
    names, asked = traversals(), Asked()
    for method, route, parameter in places:
        for name in names if most is None else chance.sample(names, most):
            answer = ask_for(target, method, route, parameter, name)
            asked.statuses[status_of(answer)] += 1
            if any(sign in answer for sign in signs):
                asked.wrong.append(f"{method} {route} with {name}: {answer[:500]!r}")
    opened = events_since(events, warm)
    complain([*asked.wrong, *opened])
    count = asked.statuses.total()
    yield "traversals: names", len(names), "names", len(names)
    yield from (
        (f"traversals: answers {status}", number, "answers", count) for status, number in sorted(asked.statuses.items())
    )
    yield "traversals: answers with a byte of a file outside", len(asked.wrong), "answers", count
    yield "traversals: files opened, code run", len(opened), "events", count
    yield (
        "traversals: answers of 5xx",
        sum(n for status, n in asked.statuses.items() if status >= 500),
        "answers",
        count,
    )


def named_places(routes: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    for method, route in routes:
        for parameter in re.findall(r"\{(\w+)\}", route):
            yield method, route, parameter
    yield "GET", "/{name}", "name"
    yield "GET", "/static/{name}", "name"


def ask_for(target: Target, method: str, route: str, parameter: str, name: str) -> bytes:
    return target.ask(method, target.path(route, **{parameter: name}), [("Host", target.host)])


def traversals() -> list[str]:
    climbing = (up * depth + file for up in UPWARDS for depth in DEPTHS for file in FILES)
    return list(dict.fromkeys([*WHOLE, *climbing]))
