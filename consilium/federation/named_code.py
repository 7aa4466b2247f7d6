"""Classes of other packages that a study names: the server imports only those its owner has allowed."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection
from pathlib import Path

from consilium.errors import StudyError
from consilium.extensions import code_id, file_of, named_code
from consilium.federation.places import ALLOWED
from consilium.study import Study
from consilium.study_reading import make_study


def allowed_code() -> list[str]:
    """What `consilium federation server --code` named."""
    return os.environ.get(ALLOWED, "").splitlines()


def read_submitted(path: Path, allowed: Collection[str]) -> Study:
    """A study that the administrator has submitted; nothing it names is imported before its names were checked."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StudyError(f"the study is not valid TOML: {error}.") from error
    own = {code_id(name): name for name in allowed}
    files = {}
    for name in named_code(tables):
        if code_id(name) not in own:
            raise StudyError(
                f"the study names {name}, which is not the project's own code and does not run on this server; its "
                f"owner allows it with `consilium federation server --code {name}`."
            )
        files[file_of(name)] = file_of(own[code_id(name)])
    return make_study({**tables, "code": files}, path.parent)  # this server's own files, whatever the study says
