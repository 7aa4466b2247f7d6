"""What the administrator fetches from the server: every name is checked, and all stays in one folder."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from nvflare.fuel.hci.client.file_transfer import FileTransferModule

from consilium.errors import RunError

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]*")


def inside(folder: Path, name: object) -> Path:
    """The path of `name` in `folder`; a name from outside must be one plain part, and lead nowhere else.

    Args:
        folder: an existing folder, or one to be made.
        name: text as it came from another machine.
    """
    if not (isinstance(name, str) and len(name) < 200 and _PLAIN.fullmatch(name)):
        raise RunError(f"the server named a folder {name!r}, which cannot be used; nothing was written.")
    path = folder / name
    if path.is_symlink() or path.resolve().parent != folder.resolve():
        raise RunError(f"{path} is a link to another place; remove it, or fetch into another folder with --runs.")
    return path


def copy_plain(source: Path, target: Path) -> None:
    """Copy a folder of files; a link or anything else that is not a file or a folder is refused before the copy."""
    for place, folders, files in os.walk(source):
        for path in (Path(place) / name for name in (*folders, *files)):
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise RunError(f"the server sent {path.name!r}, which is not a plain file; nothing was written.")
    for place, folders, files in os.walk(target):
        for path in (Path(place) / name for name in (*folders, *files)):
            if path.is_symlink():
                raise RunError(f"{path} is a link to another place; remove it, or fetch into another folder.")
    shutil.copytree(source, target, dirs_exist_ok=True)


def guard_downloads() -> None:
    """Check the names of files that the server offers; NVIDIA FLARE 2.9 joins them to a path as they come."""
    if getattr(FileTransferModule.pull_binary_file, "checked", False):
        return
    pull = FileTransferModule.pull_binary_file

    def checked(module: Any, args: Any, ctx: Any) -> Any:
        transfer, folder, file = args[2], args[4], args[5]
        for name in (f"{folder}__{transfer}", *Path(str(file)).parts):
            inside(Path(module.download_dir), name)
        return pull(module, args, ctx)

    checked.checked = True  # type: ignore[attr-defined]
    FileTransferModule.pull_binary_file = checked
