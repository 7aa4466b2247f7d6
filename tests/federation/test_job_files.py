"""A job is two fixed documents and a study, signed by the administrator; anything else is not run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobProcessArgs
from nvflare.lighter.utils import load_private_key_file, sign_folders

from consilium.federation import job_files, launchers, start
from consilium.federation.kits import make_kits
from consilium.federation.project import Project
from tests.federation.test_cell_policy import J

Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_kits(Project("eyes", "localhost", 8002, ("ada", "bea")), tmp_path_factory.mktemp("kits") / "kits")


def sign(app: Path, kit: Path) -> None:
    key = load_private_key_file(str(kit / "startup/client.key"))
    sign_folders(str(app), key, str(kit / "startup/client.crt"))


def deployed(kits: dict[str, Path], tmp_path: Path, spoil: Spoil = lambda app: None, signer: str = "admin") -> Path:
    """A job's files as they lie at a site, spoilt before they were signed."""
    app = tmp_path / "app"
    job_files.write_app(app, "[study]\n")
    spoil(app)
    if signer:
        sign(app, kits[signer])
    return app


def fault(app: Path, kits: dict[str, Path]) -> str:
    return job_files.fault(app, kits["ada"])


def test_a_studys_job_is_run(kits: dict[str, Path], tmp_path: Path) -> None:
    assert fault(deployed(kits, tmp_path), kits) == ""


def add(name: str, text: str = "{}") -> Spoil:
    def write(app: Path) -> None:
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text(text)

    return write


SHELL = '{"path": "consilium.federation.supervisor.start", "args": {"folder": ".", "arguments": ["/bin/sh"]}}'
CLIENT, SERVER = "config/config_fed_client.json", "config/config_fed_server.json"
SPOILS: dict[str, Spoil] = {
    "another callable of the package": add(
        CLIENT, f'{{"format_version": 2, "executors": [{{"tasks": ["*"], "executor": {SHELL}}}]}}'
    ),
    "at the server": add(SERVER, f'{{"format_version": 2, "workflows": [{SHELL}]}}'),
    "nested in arguments": lambda app: (app / CLIENT).write_bytes(
        job_files.DOCUMENTS["config_fed_client.json"].replace(b'"args": {}', b'"args": {"x": %s}' % SHELL.encode())
    ),
    "another executor": lambda app: (app / CLIENT).write_bytes(
        job_files.DOCUMENTS["config_fed_client.json"].replace(b".SiteJob", b".OtherJob")
    ),
    "a filter": add(
        CLIENT, f'{{"format_version": 2, "task_data_filters": [{{"tasks": ["*"], "filters": [{SHELL}]}}]}}'
    ),
    "a component": add(CLIENT, f'{{"format_version": 2, "components": [{SHELL}]}}'),
    "one space more": lambda app: (app / CLIENT).write_bytes(job_files.DOCUMENTS["config_fed_client.json"] + b" "),
    "code": add("custom/evil.py", "raise SystemExit"),
    "an empty code folder": lambda app: (app / "custom").mkdir(),
    "another format of the document": add("config/config_fed_client.conf", "executors = []"),
    "an environment": add("config/environment.json"),
    "a log configuration": add("config/log_config.json"),
    "a second study": add("study.toml"),
    "no study": lambda app: (app / "config/study.toml").unlink(),
    "a link": lambda app: ((app / "config/study.toml").unlink(), os.symlink("/etc/passwd", app / "config/study.toml")),
    "a very long study": add("config/study.toml", "#" * (job_files.LARGEST_STUDY + 1)),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=list(SPOILS))
def test_anything_else_is_not(kits: dict[str, Path], tmp_path: Path, spoil: Spoil) -> None:
    app = deployed(kits, tmp_path, spoil, signer="" if spoil is SPOILS["a link"] else "admin")
    assert fault(app, kits)


def test_a_job_the_administrator_has_not_signed_is_not_run(kits: dict[str, Path], tmp_path: Path) -> None:
    """A server can pass a study on, not write one; nor can a site."""
    assert fault(deployed(kits, tmp_path / "nobody", signer=""), kits) == "the administrator has not signed this job"
    assert fault(deployed(kits, tmp_path / "site", signer="bea"), kits) == "the administrator has not signed this job"
    app = deployed(kits, tmp_path / "later")
    (app / "config/study.toml").write_text('[method]\nname = "other"\n')
    assert fault(app, kits) == "the administrator has not signed this job"
    others = make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path / "others")
    app = deployed(others, tmp_path / "elsewhere")
    assert fault(app, kits) == "the administrator has not signed this job"


@pytest.mark.parametrize("path", [job_files.SERVER_CLASS, job_files.SITE_CLASS])
def test_the_modules_a_job_names_hold_one_callable(path: str) -> None:
    name, _, kind = path.rpartition(".")
    module = importlib.import_module(name)
    found = [key for key, value in vars(module).items() if callable(value) and not key.startswith("__")]
    assert found == [kind]
    assert path.encode() in b"".join(job_files.DOCUMENTS.values())


def test_a_jobs_process_looks_again(kits: dict[str, Path]) -> None:
    """Files that were changed after they arrived end the process before anything of them is read."""
    app = kits["bea"] / J / "app_bea"
    job_files.write_app(app, "[study]\n")
    sign(app, kits["admin"])
    start.check_job(str(kits["bea"]), "bea", J)
    (app / "custom").mkdir()
    with pytest.raises(SystemExit, match="custom"):
        start.check_job(str(kits["bea"]), "bea", J)
    for name in ("startup", "../bea", "x y", ""):
        with pytest.raises(SystemExit, match="not a job's name"):
            start.check_job(str(kits["bea"]), "bea", name)


def test_nothing_a_job_says_reaches_the_command_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a launcher's arguments nor an environment, an image or an interpreter of the job's own."""
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(launchers, "spawn_process", lambda command, env: started.append((command, env)) or object())
    monkeypatch.setattr(launchers, "get_credential_env", lambda given: {})
    context = FLContext()
    context.set_prop(FLContextKey.JOB_PROCESS_ARGS, {JobProcessArgs.JOB_ID: ("-n", J)})
    hostile = {"command": "/bin/sh", "args": ["-c", "sh"], "env": {"LD_PRELOAD": "sh"}, "python": "sh", "image": "sh"}
    meta = {
        "job_id": J,
        "launcher_spec": {"bea": {"process": hostile}},
        "environment": hostile,
        "byoc": True,
        **hostile,
    }
    launchers.SiteJobStarter().launch_job(meta, context)
    ((command, environment),) = started
    assert command == [sys.executable, "-u", "-m", "consilium.federation.start", "site-job", "-n", J]
    assert environment == dict(os.environ)
    with pytest.raises(ValueError, match="is not a job's name"):
        launchers.SiteJobStarter().launch_job({**meta, "job_id": "../startup"}, context)
