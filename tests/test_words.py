"""The word lint: the repository passes it, and it finds the words to avoid."""

import subprocess

import lint_words
import pytest
from lint_words import (
    ROOT,
    SUBJECT_LENGTH_MAX,
    Finding,
    commits,
    in_markdown,
    in_python,
    in_repository,
    in_subject,
    main,
    read_words,
)
from slices import HANG_S

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
WORDS = read_words(PAGE)
MODULE = "marshal/kafka_marshal/engine/sample.py"


def messages(findings):
    return [(each.line, each.message.partition(";")[0]) for each in findings]


# --- The repository ----------------------------------------------------------------


def test_the_repository_has_no_words_to_avoid():
    found = list(in_repository(WORDS))
    assert not found, "\n".join(map(str, found))


def test_each_table_has_words_and_replacements():
    assert {"told", "whoever", "gone on from"} <= set(WORDS.prose)
    assert set(WORDS.letters) == set("TKCMWH")
    assert {"hub", "lobby", "wishes"} <= set(WORDS.names)
    plain = {*WORDS.prose.values(), *WORDS.letters.values(), *WORDS.names.values()}
    assert all(plain)


def test_no_word_is_its_own_replacement():
    for table in (WORDS.prose, WORDS.names):
        for word, plain in table.items():
            assert list(WORDS.in_prose(plain)) == [], word


def test_contributing_names_the_command():
    assert ".venv/bin/python tools/lint_words.py" in PAGE


# --- Bad samples -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param("It is told.", (1, "'told'"), id="word"),
        pytest.param("# Told anywhere\n", (1, "'Told'"), id="heading"),
        pytest.param(
            "a\n\nIt is gone on\nfrom there.", (3, "'gone on from'"), id="wrap"
        ),
        pytest.param("| a | whoever asks |", (1, "'whoever'"), id="table"),
        pytest.param("```sh\nx\n```\nfolded anew", (4, "'anew'"), id="after-code"),
        pytest.param("[told](a.md)", (1, "'told'"), id="link-text"),
        pytest.param("after 2H at most", (1, "'2H'"), id="letter-with-number"),
        pytest.param("each H/3.", (1, "'H'"), id="letter-divided"),
        pytest.param("every T has one", (1, "'T'"), id="letter"),
    ],
)
def test_a_bad_document_is_found(text, found):
    assert messages(in_markdown(WORDS, "docs/PAGE.md", text)) == [found]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param('"""Tell it."""', (1, "'Tell'"), id="docstring"),
        pytest.param(
            'def f():\n    """A.\n\n    Said so.\n    """', (4, "'Said'"), id="in"
        ),
        pytest.param("x = 1  # folded anew", (1, "'anew'"), id="comment"),
        pytest.param(
            "# is gone on\n# from there\n", (1, "'gone on from'"), id="wrapped"
        ),
        pytest.param('raise E("nobody was told")', (1, "'told'"), id="message"),
        pytest.param('E(f"{name} was told")', (1, "'told'"), id="f-string"),
        pytest.param('Option(help="Whoever asks.")', (1, "'Whoever'"), id="help"),
        pytest.param(
            "class SidecarHub:\n    pass",
            (1, "'Hub' in the name SidecarHub"),
            id="class",
        ),
        pytest.param(
            "def tell_all(): ...", (1, "'tell' in the name tell_all"), id="function"
        ),
        pytest.param(
            "def f(told): ...", (1, "'told' in the name told"), id="parameter"
        ),
        pytest.param("x = 1\nhub = 2", (2, "'hub' in the name hub"), id="variable"),
        pytest.param("f.hub = 2", (1, "'hub' in the name hub"), id="attribute"),
        pytest.param("# Of each T\n", (1, "'T'"), id="letter"),
    ],
)
def test_bad_code_is_found(text, found):
    assert messages(in_python(WORDS, MODULE, text)) == [found]


def test_a_bad_name_of_a_module_is_found():
    (found,) = in_python(WORDS, "marshal/kafka_marshal/sidecar/lobby.py", "")
    assert (found.line, found.message.partition(";")[0]) == (
        0,
        "'lobby' in the name lobby",
    )


def test_a_bad_name_of_a_test_is_found():
    (found,) = in_python(WORDS, "tests/test_a.py", "def test_whoever_asks(): ...")
    assert found.message.startswith("'whoever' in the name test_whoever_asks")


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        ("engine: tell others", "'tell'"),
        ("Fix things", "is not `component: verb object`"),
        ("engine: Split it", "is not `component: verb object`"),
        ("engine: split it.", "is not `component: verb object`"),
        (f"engine: {'x' * SUBJECT_LENGTH_MAX}", "more than"),
    ],
)
def test_a_bad_subject_is_found(subject, message):
    (found,) = in_subject(WORDS, "abc", subject)
    assert message in found.message


# --- Good samples ------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "The process reports the end.",
        "The event `wedged` and ``told`` are names.",
        "```\ntold anew\n```",
        "  ```sh\n  told\n  ```",
        "<!-- told -->",
        "[a](told.md#anew)",
        "Ctrl-C ends it; a T-shirt; UTF-8; v2; 4 KiB; HTTP; LC_ALL=C.",
        "It retold a foretold story.",
    ],
)
def test_a_good_document_passes(text):
    assert list(in_markdown(WORDS, "docs/PAGE.md", text)) == []


def test_letters_are_allowed_in_the_protocol():
    assert list(in_markdown(WORDS, "docs/PROTOCOL.md", "C moves by 2H.")) == []
    assert list(in_markdown(WORDS, "docs/PROTOCOL.md", "It is told."))


@pytest.mark.parametrize(
    "text",
    [
        '"""Report it."""',
        'name = "told"',
        '"""The event `told`."""',
        "x = told.tell(hear=1)",
        "class Hubris: ...",
        "def stellar(): ...",
    ],
)
def test_good_code_passes(text):
    assert list(in_python(WORDS, MODULE, text)) == []


def test_strings_of_tests_are_not_checked():
    assert list(in_python(WORDS, "tests/test_a.py", 'x = "was told it"')) == []


@pytest.mark.parametrize(
    "subject",
    [
        "engine: split Session into Claimant and Holdings",
        "cli, admin: call a pause a pause",
        "README: align a comment",
        "docs: explain `told`",
        "tests/unit: rename a test",
    ],
)
def test_a_good_subject_passes(subject):
    assert list(in_subject(WORDS, "abc", subject)) == []


# --- The command -------------------------------------------------------------------


@pytest.mark.parametrize("found", [[], [Finding("tools/a.py", 1, "'told'")]])
def test_the_command_fails_if_there_is_a_finding(found, monkeypatch, capsys):
    monkeypatch.setattr(lint_words, "in_repository", lambda _: iter(found))
    assert main([]) == len(found)
    assert capsys.readouterr().out == "".join(f"{each}\n" for each in found)


# --- Commits -----------------------------------------------------------------------


def test_only_commits_since_the_lint_are_read(tmp_path):
    def git(*arguments):
        names = ("-c", "user.name=a", "-c", "user.email=a@b.invalid")
        command = ["git", "-C", str(tmp_path), *names, *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=HANG_S)

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "engine: tell others")
    assert commits(tmp_path) == []
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "lint_words.py").write_text("")
    git("add", ".")
    git("commit", "-q", "-m", "tools: tell of words")
    git("commit", "-q", "--allow-empty", "-m", "engine: publish to all")
    git("checkout", "-q", "-b", "side")
    git("commit", "-q", "--allow-empty", "-m", "engine: close")
    git("checkout", "-q", "-")
    git("merge", "-q", "--no-ff", "--no-edit", "side")
    found = {subject for _, subject in commits(tmp_path)}
    assert found == {"engine: publish to all", "engine: close"}, "and no merges"


def test_a_distribution_without_history_has_no_commits(tmp_path):
    assert commits(tmp_path) == []


def test_a_bad_word_of_a_deployed_file_is_found(tmp_path):
    unit = tmp_path / "deploy/systemd/a.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Unit]\n# As it is told.\nDescription=A log\n")
    (found,) = in_repository(WORDS, tmp_path)
    assert str(found).startswith("deploy/systemd/a.service:2: 'told'")
