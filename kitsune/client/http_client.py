"""The HTTP client of a Kitsune server: calls with a deadline and validated responses. Does not import torch.

Responses are not trusted: redirects are not followed, size and time are limited, and a response in another format
raises UnreachableError, as if no server had answered.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import quote

from kitsune import __version__
from kitsune.base.digest import digest_of
from kitsune.client.http_deadline import HttpRequest, HttpResponse, exchange
from kitsune.client.server_address import Server
from kitsune.errors import PlanError, RefusedError, UnreachableError
from kitsune.plan import MAX_PLAN_BYTES, Environment, Plan, PlanQuery

CALL_S: Final = 30.0
UPLOAD_S: Final = 300.0
MAX_ANSWER_BYTES: Final = 4 * 2**20
MAX_TRIALS_BYTES: Final = 64 * 2**20
API: Final = "/api/v1"
PROBLEM: Final = "application/problem+json"
#: Fields of an Environment that the server matches plans against.
MACHINE: Final = ("device", "gpu", "compute_capability", "memory_bytes", "torch", "triton", "cuda", "driver")
#: Statuses, besides 500 and above, for which a retry may succeed: request timeout, too many requests.
TRY_AGAIN: Final = (408, 429)
_MAX_DETAIL: Final = 1000

Method = Literal["DELETE", "GET", "POST", "PUT"]


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """The plan for a workload on a machine, or None, and the reason."""

    plan: Plan | None
    reason: str


class Client:
    """A client of one server. No call takes longer than `call_s` seconds, and all together no longer than `in_all_s`.

    Every method raises UnreachableError when there is no valid response in time, and RefusedError when the server
    refuses the request.
    """

    def __init__(self, server: Server, *, call_s: float = CALL_S, in_all_s: float = math.inf) -> None:
        self.server = server
        self._call_s = call_s
        self._left_s = in_all_s

    def check_presence(self) -> None:
        """Checks that a Kitsune server answers. Does not send the token."""
        answer = self._ask("GET", "/healthz", limit=1024, with_token=False)
        if answer.body.strip() != b"ok":
            raise self._strange("something else than a Kitsune server answers there")

    def find_plan(self, asked: PlanQuery, environment: Environment) -> FoundPlan:
        """The best plan for a step in this environment. An altered plan or one of another step raises."""
        machine = environment.model_dump(mode="json", include=set(MACHINE))
        known = {"batch": asked.batch, **machine}
        query = {"fingerprint": asked.fingerprint, **{name: str(value) for name, value in known.items() if value}}
        value = self._json("GET", f"{API}/plans", query=query, limit=2 * MAX_PLAN_BYTES)
        if "plan" not in value:
            raise self._strange("the answer has no field plan")
        if value["plan"] is None:
            return FoundPlan(None, _line(value.get("reason", "there is no plan yet")))
        plan = self._plan(value["plan"])
        if not plan.is_of(asked.fingerprint):
            raise self._strange("the plan that it sent is for another workload")
        return FoundPlan(plan, _line(value.get("reason", "")))

    def plan(self, plan_id: str) -> Plan:
        plan = self._plan(self._json("GET", f"{API}/plans/{_segment(plan_id)}", limit=2 * MAX_PLAN_BYTES))
        if plan.plan_id != plan_id:
            raise self._strange(f"plan {plan_id} was requested, but {plan.plan_id} came")
        return plan

    def put_archive(self, content: bytes) -> str:
        """Uploads an archive. Returns the digest under which the server stores it, which `start_run` takes."""
        path = f"{API}/archives/{digest_of(content)}"
        value = self._json("PUT", path, content=content, kind="application/octet-stream", call_s=UPLOAD_S)
        return self._text(value, "sha256")

    def start_run(self, request: Mapping[str, Any], key: str) -> dict[str, Any]:
        """Starts a run and returns it. A repeated call with the same idempotency key returns the same run."""
        headers = {"Idempotency-Key": key}
        content = json.dumps(request, allow_nan=False).encode()
        return self._json("POST", f"{API}/runs", content=content, kind="application/json", headers=headers)

    def run(self, run_id: str) -> dict[str, Any]:
        return self._json("GET", f"{API}/runs/{_segment(run_id)}")

    def cancel_run(self, run_id: str) -> dict[str, Any]:
        return self._json("POST", f"{API}/runs/{_segment(run_id)}/cancel")

    def delete_run(self, run_id: str, *, with_plan: bool = False) -> dict[str, Any]:
        query = {"plan": "true"} if with_plan else {}
        return self._json("DELETE", f"{API}/runs/{_segment(run_id)}", query=query)

    def runs(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of runs: {"runs": [...], "after": the cursor of the next page or null}."""
        return self._listing("runs", f"{API}/runs", query=query)

    def trials(self, run_id: str, after: int = -1) -> list[Any]:
        """Trials with a number above `after`, in order. One call may not return all of them."""
        query = {"after": str(after)}
        path = f"{API}/runs/{_segment(run_id)}/trials"
        return list(self._listing("trials", path, query=query, limit=MAX_TRIALS_BYTES)["trials"])

    def _listing(self, name: str, path: str, **options: Any) -> dict[str, Any]:
        """A response with a list in the field `name`."""
        value = self._json("GET", path, **options)
        if not isinstance(value.get(name), list):
            raise self._strange(f"the answer holds no list of {name}")
        return value

    def _json(self, method: Method, path: str, **options: Any) -> dict[str, Any]:
        """The JSON object of a successful response."""
        answer = self._ask(method, path, **options)
        value = _parsed(answer.body)
        if value is None:
            raise self._strange(f"it answered {answer.status} with something that is not a JSON object")
        return value

    def _ask(
        self,
        method: Method,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        content: bytes | None = None,
        kind: str = "",
        headers: Mapping[str, str] | None = None,
        limit: int = MAX_ANSWER_BYTES,
        call_s: float | None = None,
        with_token: bool = True,
    ) -> HttpResponse:
        token = self.server.token if with_token else None
        all_headers = {
            "User-Agent": f"kitsune/{__version__}",
            "Accept": "application/json",
            **({"Content-Type": kind} if kind else {}),
            **({"Authorization": f"Bearer {token}"} if token else {}),
            **(headers or {}),
        }
        question = HttpRequest(method, self.server.url + path, dict(query or {}), all_headers, content, limit)
        began = time.monotonic()
        try:
            answer = exchange(question, min(call_s or self._call_s, self._left_s), direct=self.server.is_loopback)
        except UnreachableError as error:
            raise self._strange(str(error)) from error
        finally:
            self._left_s = max(0.0, self._left_s - (time.monotonic() - began))
        self._check_status(answer)
        return answer

    def _check_status(self, answer: HttpResponse) -> None:
        if 200 <= answer.status < 300:
            return
        if 300 <= answer.status < 400:
            to = _line(answer.location) or "nowhere"
            raise self._strange(f"it redirects to {to}, and redirects are not followed; use that address")
        problem = _parsed(answer.body) if answer.media_type == PROBLEM else None
        if problem is None:
            raise self._strange(f"it answered {answer.status}, and not as a Kitsune server does")
        detail = _line(problem.get("detail") or problem.get("title") or "no reason given")
        if answer.status >= 500 or answer.status in TRY_AGAIN:
            raise self._strange(f"it cannot answer now ({answer.status}): {detail}")
        raise RefusedError(self.server.url, answer.status, detail)

    def _plan(self, value: Any) -> Plan:
        try:
            return Plan.from_json(value)
        except PlanError as error:
            raise self._strange(_line(f"the plan that it sent is refused: {error}")) from error

    def _text(self, value: dict[str, Any], name: str) -> str:
        found = value.get(name)
        if not isinstance(found, str) or not found.isalnum():
            raise self._strange(f"the answer has no {name}")
        return found

    def _strange(self, problem: str) -> UnreachableError:
        return UnreachableError(f"{self.server.url}: {problem}")


def _segment(name: str) -> str:
    """A name as one segment of a path. Dots are escaped, since ".." would go up."""
    return quote(name, safe="").replace(".", "%2E")


def _parsed(body: bytes) -> dict[str, Any] | None:
    """The JSON object, or None when the body is anything else."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _line(text: Any) -> str:
    """Text of a server as one printable line for a log or a terminal."""
    words = " ".join(str(text)[: 2 * _MAX_DETAIL].split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)[:_MAX_DETAIL]
