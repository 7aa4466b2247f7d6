"""A suite file is read whole or refused in a sentence that names the place and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from consilium.errors import StudyError
from consilium.suites import load_suite
from tests.suites.bench import write_suite

GOOD = 'methods = ["fedavg", "fedsm"]\nseeds = [0, 1]'


def test_a_suite_has_sensible_defaults(tmp_path: Path, federation: Path) -> None:
    suite = load_suite(write_suite(tmp_path, federation, 'methods = ["separate", "fedavg"]\nseeds = [4, 5]'))
    assert list(suite.kinds) == ["local", "fedavg"]  # aliases are resolved
    assert (suite.heading.chosen_on, suite.heading.labels, suite.papers, suite.phantom) == (4, ("mean",), (), None)


def test_other_seeds_share_what_the_suite_chose(tmp_path: Path, federation: Path) -> None:
    path = write_suite(tmp_path, federation, 'methods = ["fedavg"]\nseeds = [4, 5]')
    heading = load_suite(path, seeds=[6, 7]).heading
    assert (heading.seeds, heading.chosen_on) == ((6, 7), 4)
    with pytest.raises(StudyError, match="6 is there twice"):
        load_suite(path, seeds=[6, 6])


def test_settings_may_be_written_quoted_or_as_dotted_keys(tmp_path: Path, federation: Path) -> None:
    quoted = '[methods.fedavg]\n"local.optimizer" = "sgd"\n[choose]\n"local.lr" = [0.1, 0.2]'
    dotted = '[methods.fedavg]\nlocal.optimizer = "sgd"\n[choose]\nlocal.lr = [0.1, 0.2]'
    one, two = (
        load_suite(write_suite(tmp_path / name, federation, GOOD, rest)) for name, rest in zip("ab", (quoted, dotted))
    )
    assert one.parts == two.parts
    assert one.choose == two.choose == {"local.lr": (0.1, 0.2)}
    assert one.parts["fedavg"].fixed == {"local.optimizer": "sgd"}


BAD_HEADS = [
    ("", "[suite] methods is required."),
    ("methods = []", "[suite] methods is empty: name at least one."),
    ('methods = "fedavg"', "[suite] methods = 'fedavg': it must be a list, for instance"),
    ('methods = ["fedsmm"]', "[suite] methods: there is no method 'fedsmm'; did you mean 'fedsm'?"),
    ('methods = ["fedavg", "fedavg"]', "[suite] methods: 'fedavg' is there twice; keep one."),
    ('methods = ["local", "separate"]', "'separate' is 'local', which is there already"),
    ('methods = ["fedavg"]\nseed = [1]', "[suite] has no key 'seed'; did you mean 'seeds'?"),
    ('methods = ["fedavg"]\nseeds = []', "[suite] seeds is empty"),
    ('methods = ["fedavg"]\nseeds = [1, 1]', "[suite] seeds: 1 is there twice"),
    ('methods = ["fedavg"]\nseeds = [-1]', "seeds are whole numbers from 0 on"),
    ('methods = ["fedavg"]\nbase = "x.toml"', "[suite] base names a file and there are [base] tables too; take one."),
]

BAD_RESTS = [
    ("[chose]\n", "there is no section [chose]; did you mean 'choose'?"),
    ('[choose]\n"local.lr" = 0.1', "[choose] \"local.lr\" = 0.1: it must be a list of the values to take."),
    ('[choose]\n"local.lr" = []', "it must be a list of the values to take"),
    ('[choose]\n"local.lr" = [1, 1]', "1 is there twice"),
    ('[choose]\n"local.optimiser" = [1]', "[local] has no key 'optimiser'; did you mean 'optimizer'?"),
    ('[choose]\nlr = [1]', "[choose] 'lr': a study has no section 'lr'"),
    ('[choose]\nlocal = [1]', "[choose] 'local': write section and key"),
    ('[choose]\n"method.pul" = [1]', "[choose] 'method.pul': no method here has key 'pul'; did you mean 'pull'?"),
    ("[choose]\ntogether = 3", "[choose] together must be a list of sets of settings"),
    ('[choose]\ntogether = [{"local.lr" = 1}, {}]', "[choose] together must be a list of sets of settings"),
    ('[choose]\ntogether = [{"local.lr" = 1}, {"local.lr" = 1}]', "is there twice"),
    ('[choose]\ntogether = [{"local.lr" = 1}, {"local.batch_size" = 1}]', "is in some of the sets and not in others"),
    ('[choose]\n"local.lr" = [1]\ntogether = [{"local.lr" = 1}]', "'local.lr' has a list of its own and is in"),
    ('[choose]\ntogether = [{"local.lrr" = 1}]', "[choose.together] 'local.lrr': [local] has no key 'lrr'"),
    ('[grid]\n"local.lr" = [1]\n[choose]\ntogether = [{"local.lr" = 1}]', "'local.lr' is in both [grid] and [choose]"),
    ('[grid]\ntogether = [{"local.lr" = 1}]', "[grid] 'together': a study has no section 'together'"),
    ('[grid]\n"study.seed" = [1, 2]', "[grid] 'study.seed' cannot be set here: seeds are in [suite] seeds."),
    ('[grid]\n"method.pull" = [0.5]\n[choose]\n"method.pull" = [0.7]', "'method.pull' is in both [grid] and [choose]"),
    ('[row]\nname = "x"\nmethod = "fedsm"', "write [[row]], with two brackets"),
    ('[[row]]\nmethod = "fedsm"', "[[row]] needs a `name` for the table and a `method`"),
    ('[[row]]\nname = "x"\nmethod = "fedprox"', "[[row]] 'x': 'fedprox' is not in [suite] methods"),
    ('[[row]]\nname = "x"\nmethod = "fedsm"\n"method.pul" = 1', "[row 'x'] 'method.pul': [method] has no key 'pul'"),
    ('[[row]]\nname = "x"\nmethod = "fedsm"\n[[row]]\nname = "x"\nmethod = "fedavg"', "'x' is there twice"),
    ('[[row]]\nname = "x"\nmethod = "fedsm"\n"study.leave_out" = ["a"]', "makes columns; write it in [grid]"),
    ('[[row]]\nname = "x"\nmethod = "fedsm"\n[grid]\n"local.lr" = [1]', "has [[row]] and 'local.lr' in [grid]"),
    (
        '[[row]]\nname = "x"\nmethod = "fedsm"\n"local.lr" = 1\n[choose]\n"local.lr" = [1, 2]',
        "'local.lr' is in both [[row]] and [choose]",
    ),
    (
        '[[row]]\nname = "x"\nmethod = "fedsm"\n"method.pull" = 1.0\nchoose = {"method.pull" = [0.5, 0.7]}',
        "[[row]] 'x' both has and chooses 'method.pull'",
    ),
    ('[choose_where]\n"local.lr" = [1]', "write [[choose_where]], with two brackets"),
    ('[[choose_where]]\n"local.lr" = [1]', "[[choose_where]] needs `rows`"),
    (
        '[grid]\n"method.pull" = [0.5]\n[[choose_where]]\nrows = {"method.pull" = 0.6}\n"local.lr" = [1, 2]',
        "[[choose_where]] rows: no row has method.pull = 0.6; take one of [grid]'s or of a [[row]]'s.",
    ),
    ('[methods.fedprox]\n"local.lr" = 1', "[methods.fedprox]: 'fedprox' is not in [suite] methods"),
    ("[methods]\nfedavg = 3", "[methods] fedavg: write a section [methods.fedavg]"),
    ('[methods.fedsm]\n"method.mu" = 1', "[methods.fedsm] 'method.mu': [method] has no key 'mu'"),
    ('[methods.fedavg]\n"local.lr" = 1\nlocal.lr = 2', "[methods.fedavg] 'local.lr' is written twice; keep one."),
    ("[methods.fedavg]\nchoose = 3", "[methods.fedavg.choose]: write it as a section"),
    ('[phantom]\nkind = "retin"\nto = "x"', "there is no such phantom; did you mean 'retina'?"),
    ('[phantom]\nkind = "retina"', "[phantom] to is required."),
    ('[phantom]\nkind = "retina"\nto = "x"', "the base names [data] federation and the suite draws one in [phantom]"),
    ('[phantom]\nkind = "retina"\nto = "x"\ndivision = 2', "sites of the retina phantom annotate everything"),
    (
        '[phantom]\nkind = "retina"\nto = "x"\npartitions = ["practical"]',
        "[phantom] partitions: the retina phantom has sites of its own",
    ),
    (
        '[phantom]\nkind = "digits"\nto = "x"\npartitions = ["practicle"]',
        "[phantom] partitions: there is no scheme 'practicle'; did you mean 'practical'?",
    ),
    (
        '[grid]\n"data.federation" = ["a"]\n"study.leave_out" = [["b"]]',
        "[grid] has both federations and sites left out in turn",
    ),
    ('[paper]\ncaption = "T"\ncolumns = ["a"]', "[paper] rows is required."),
    ('[paper]\ncaption = "T"\ncolumns = ["a"]\nrows = {X = [1, 2]}', "[paper] row 'X' has 2 values for 1 column;"),
    ('[paper]\nfile = "none.toml"\ntables = ["t"]', "cannot read the file of the paper's tables"),
    ('[paper]\nlabel = "disc"\ncaption = "T"\ncolumns = []\nrows = {}', "is about label 'disc', which is not in"),
    ("[base.lokal]\nlr = 1", "[base] has no section 'lokal'; did you mean 'local'?"),
    ("nonsense", "is not valid TOML"),
]  # fmt: skip


@pytest.mark.parametrize(("head", "sentence"), BAD_HEADS)
def test_a_bad_heading_is_refused(tmp_path: Path, federation: Path, head: str, sentence: str) -> None:
    with pytest.raises(StudyError) as caught:
        load_suite(write_suite(tmp_path, federation, head))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("rest", "sentence"), BAD_RESTS)
def test_a_bad_section_is_refused(tmp_path: Path, federation: Path, rest: str, sentence: str) -> None:
    with pytest.raises(StudyError) as caught:
        load_suite(write_suite(tmp_path, federation, GOOD, rest))
    assert sentence in str(caught.value)


def test_a_missing_file_and_a_missing_base_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="cannot read the suite"):
        load_suite(tmp_path / "none.toml")
    (tmp_path / "s.toml").write_text('[suite]\nname = "x"\nmethods = ["fedavg"]\n', encoding="utf-8")
    with pytest.raises(StudyError, match=r"\[suite\] base is required: a study file beside the suite"):
        load_suite(tmp_path / "s.toml")
    (tmp_path / "s.toml").write_text('[suite]\nname = "x"\nmethods = ["fedavg"]\nbase = "b.toml"', encoding="utf-8")
    with pytest.raises(StudyError, match=r"cannot read the base study .*b\.toml"):
        load_suite(tmp_path / "s.toml")
