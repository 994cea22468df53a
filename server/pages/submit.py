"""The form that submits an archive as a new run."""

import hashlib
from typing import IO, Any, Final

from anyio import to_thread
from fastapi import Request
from fastapi.responses import RedirectResponse, Response
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from kitsune.errors import ArchiveError
from kitsune.submission.format.archive import Archive
from server.api.archives import CHECKS
from server.http.auth import allows, caller
from server.http.context import Context, Here
from server.pages import flash
from server.pages.frame import PageRouter, form_of, render
from server.payloads.problems import wrong_fields
from server.payloads.schemas import Submit
from tuner.records import Run
from tuner.store.queries import archives, submits
from tuner.store.queries.tokens import Scope, Token

PLACE: Final = "/submit"
#: The fields of the form with their initial values.
BLANK: Final = {"name": "", "device": "", "budget": "10m", "trials": "", "memory_limit": ""}
#: Errors about `Submit` as a whole are about its budget.
_OF_ALL: Final = {"body": "budget"}
_NO_FILE: Final = {"archive": "choose the .ksn file that `kitsune export` wrote"}

router = PageRouter(Scope.SUBMIT)


@router.get(PLACE)
def ask(request: Request) -> Response:
    answer = _form(request, BLANK, started=flash.message_of(request, PLACE))
    flash.clear(answer, request, PLACE)
    return answer


@router.post(PLACE)
async def submit(request: Request, here: Here) -> Response:
    """Redirects to the page of the run, or back to the form if the token may not read runs.

    An invalid form is shown again with an error beside each field.
    """
    given = {**BLANK, **form_of(request)}
    file = request.state.form.get("archive")
    if not isinstance(file, UploadFile) or not file.size:
        return _form(request, given, _NO_FILE)
    try:
        asked = asked_of(given, await to_thread.run_sync(_digest, file.file))
    except ValidationError as error:
        found = wrong_fields(error.errors(include_url=False, include_input=False))
        return _form(request, given, {_OF_ALL.get(one.field, one.field): one.problem for one in found})
    try:
        run = await to_thread.run_sync(_submit, here, file.file, asked, caller(request), limiter=CHECKS)
    except ArchiveError as error:
        return _form(request, given, {"archive": str(error)})
    if allows(caller(request), Scope.READ):
        return RedirectResponse(f"/runs/{run.id}", 303)
    answer = RedirectResponse(PLACE, 303)
    flash.set_message(answer, request, PLACE, run.id)
    return answer


def asked_of(given: dict[str, str], sha256: str) -> Submit:
    """The fields of the form as the body of the API; blank ones are left out. Raises ValidationError."""
    trials = given["trials"]
    fields: dict[str, Any] = {
        "archive": sha256,
        "name": given["name"],
        "device": given["device"],
        "budget": given["budget"] or None,
        "trials": number_of(trials) if trials else None,
        "memory_limit": given["memory_limit"] or None,
    }
    return Submit.model_validate(fields)


def number_of(text: str) -> int | str:
    """An integer; text that is not one, or too long, is returned unchanged and fails the validation."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else text


def _form(request: Request, given: dict[str, str], errors: dict[str, str] | None = None, started: str = "") -> Response:
    return render(
        request,
        "submit.html",
        status=422 if errors else 200,
        given=given,
        errors=errors or {},
        started=started,
    )


def _digest(file: IO[bytes]) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _submit(here: Context, file: IO[bytes], asked: Submit, token: Token) -> Run:
    """Stores the archive and submits a run. Raises ArchiveError; nothing is stored then."""
    file.seek(0)
    archive = Archive.from_bytes(file.read())
    content, settings = archive.to_bytes(), here.settings
    with here.database.begin() as connection:
        stored, _ = archives.put(connection, content, archive, team=token.team, most_bytes=settings.team_archive_bytes)
        request = asked.request().model_copy(update={"archive": stored.sha256})
        run, _ = submits.submit(connection, request, owner=token.id, team=token.team, quota=settings.quota)
    return run
