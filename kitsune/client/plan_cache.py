"""Caches plans of a server in the home folder, for when it does not answer. Does not import torch.

A file is used only if its content still matches its digest. A folder that cannot be written to disables the cache only.
"""

import contextlib
import logging
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from kitsune.base.digest import digest_of, digest_of_json
from kitsune.base.environment import home_folder, private_folder
from kitsune.errors import PlanError
from kitsune.plan import Environment, Match, Plan, PlanQuery

log = logging.getLogger("kitsune")


class PlanCache:
    """The cached plans of one server. `folder` is created with the first entry."""

    def __init__(self, server_url: str, home: Path | None = None) -> None:
        name = digest_of(server_url)[:16]
        self.folder = (home or home_folder()) / "plans" / name

    @property
    def is_empty(self) -> bool:
        try:
            return next(self.folder.glob("*.json"), None) is None
        except OSError:
            return True

    def get(self, asked: PlanQuery, environment: Environment) -> Plan | None:
        """The cached plan for this step and environment, if it is intact and may be applied here."""
        file = self._file(asked, environment)
        try:
            if not file.is_file():  # reading a device or a pipe might never end
                return None
            plan = Plan.load(file)
        except (OSError, PlanError):
            return None
        fits = plan.environment is not None and plan.environment.match(environment)[0] is not Match.REFUSED
        return plan if fits and plan.is_of(asked.fingerprint) else None

    def keep(self, asked: PlanQuery, environment: Environment, plan: Plan) -> None:
        """Writes an entry atomically, also when other processes write it or the machine fails."""
        try:
            private_folder(self.folder)
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as file:
                part = Path(file.name)
            try:
                plan.save(part)
                os.replace(part, self._file(asked, environment))
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            log.info("cannot cache the plan in %s: %s", self.folder, error)

    def forget(self, asked: PlanQuery, environment: Environment) -> None:
        """Deletes an entry, for a server that no longer has the plan."""
        with contextlib.suppress(OSError):
            self._file(asked, environment).unlink(missing_ok=True)

    def _file(self, asked: PlanQuery, environment: Environment) -> Path:
        question = {**asdict(asked), **environment.model_dump(mode="json", exclude={"python", "kitsune"})}
        return self.folder / f"{digest_of_json(question)}.json"
