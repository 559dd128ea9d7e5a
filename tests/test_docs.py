"""The documents agree with the code.

Blocks of Python compile, commands parse against the real command line, targets of
links exist, and tables and lists of things in the code are complete. Blocks marked
``<!-- run: name -->`` are also executed: here if they need no broker, else in
``integration/test_docs.py``.
"""

import ast
import inspect
import json
import re
import runpy
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import mmh3
import msgspec
import pytest

import kafka_marshal
from kafka_marshal import Marshal, errors
from kafka_marshal.client import OPEN_MS_MAX
from kafka_marshal.config import Callbacks, ConsumerConfig
from kafka_marshal.engine.releases import EXPECTED
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topic_rules import coordination_configs
from kafka_marshal.metrics import EFFECTS
from kafka_marshal.observability import logs
from kafka_marshal.protocol import state as outcomes
from kafka_marshal.protocol.claiming import Phase
from kafka_marshal.protocol.codec import FRAME_BYTES_MAX, decode, encode, kind_of
from kafka_marshal.protocol.hashing import coordinating_partition
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import (
    KINDS,
    LIMIT_DEFAULTS,
    ImportedDirective,
    ImportedKey,
    ImportedPrevious,
    ImportedSettings,
    Limits,
    PlannedMember,
    PlannedTopic,
    Resume,
    ScopedTopic,
    StagedTopic,
)
from kafka_marshal.protocol.settings import TUNABLES
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.text import object_to_entry

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "marshal" / "kafka_marshal"
SINKS = ROOT / "examples" / "sinks"
DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
    if path.name != "cli.md"  # generated, and compared by `make check`
)
PROTOCOL = (ROOT / "docs" / "PROTOCOL.md").read_text()
README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
GOLDEN = (ROOT / "tests" / "spec" / "golden.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()

BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[a-z]+: [a-z_]+) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a document, with the comment right before it."""

    place: str
    language: str
    code: str
    mark: str


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for found in BLOCK.finditer(text):
        line = text[: found.start()].count("\n") + 1
        place = f"{path.relative_to(ROOT)}:{line}"
        yield Block(place, found["language"], found["code"], found["mark"] or "")


ALL_BLOCKS = [block for path in DOCUMENTS for block in blocks(path)]
PYTHON_BLOCKS = [block for block in ALL_BLOCKS if block.language == "python"]


def marked(text: str, mark: str) -> str:
    """Return the block or table that follows a comment."""
    _, found, rest = text.partition(f"<!-- {mark} -->\n")
    assert found, f"no <!-- {mark} -->"
    if rest.startswith("```"):
        return rest.partition("\n")[2].partition("\n```")[0]
    return rest.partition("\n\n")[0]


def rows(text: str, mark: str) -> list[list[str]]:
    """Return the cells of a marked table, without its head."""
    lines = marked(text, mark).splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def items(text: str, mark: str) -> dict[str, str]:
    """Return the text of each name in a marked list, as one line."""
    lines = re.split(r"^- ", marked(text, mark), flags=re.MULTILINE)[1:]
    found = (" ".join(line.split()).partition(": ") for line in lines)
    return {name: rest for name, _, rest in found}


def listed_names(text: str, mark: str) -> list[str]:
    """Return the names before the colons of a marked list."""
    heads = re.findall(r"^- (`.+?)(?: \(\w+\))?:", marked(text, mark), re.MULTILINE)
    return [name for head in heads for name in names(head)]


def names(cell: str) -> list[str]:
    """Return the names in a cell that are written as code."""
    return re.findall(r"`([^`]+)`", cell)


# --- Blocks --------------------------------------------------------------------------


def test_the_main_documents_exist():
    found = {str(path.relative_to(ROOT)) for path in DOCUMENTS}
    assert found >= {
        "README.md",
        "SECURITY.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/reference.md",
        "docs/ARCHITECTURE.md",
        "docs/PROTOCOL.md",
        "docs/TESTING.md",
    }


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=lambda block: block.place)
def test_python_blocks_compile(block):
    compile(block.code, block.place, "exec")


def test_every_python_block_is_marked_to_be_run():
    unmarked = [b.place for b in PYTHON_BLOCKS if not b.mark.startswith("run: ")]
    assert unmarked == []


def test_blocks_with_the_same_mark_have_the_same_code():
    """A block that two documents show is run only once."""
    code: dict[str, str] = {}
    for block in ALL_BLOCKS:
        if block.mark:
            assert code.setdefault(block.mark, block.code) == block.code, block.place


def test_json_lines_are_json():
    for block in ALL_BLOCKS:
        if block.language == "json":
            for line in block.code.splitlines():
                json.loads(line)


def test_the_example_sinks_are_those_with_tests():
    assert {path.name for path in SINKS.glob("*.py")} == {"table.py", "service.py"}


def test_the_table_sink_refuses_earlier_tokens_and_repeated_offsets():
    scope = runpy.run_path(str(SINKS / "table.py"))
    store, token = scope["store"], kafka_marshal.Token
    old, new = token(1, 0, 300), token(1, 1, 2)
    assert store("t", 0, offset=5, value=b"a", token=old)
    assert not store("t", 0, offset=5, value=b"a", token=old)
    assert store("t", 0, offset=6, value=b"b", token=new)
    assert not store("t", 0, offset=7, value=b"c", token=old)
    assert store("t", 1, offset=0, value=b"d", token=old)
    values = scope["db"].execute("SELECT value FROM results").fetchall()
    assert values == [(b"a",), (b"b",), (b"d",)]


def test_the_service_sink_checks_the_user_before_the_token():
    scope = runpy.run_path(str(SINKS / "service.py"))

    def ask(user, header, body="a"):
        return int(scope["handle"](user, "g/t/0", header=header, body=body))

    greatest = f"{2**32 - 1}.0.0"
    assert ask(None, greatest) == 403
    assert ask("somebody", greatest) == 403
    assert ask("billing", "9223372036854775807.0.0") == 400
    assert ask("billing", "1.0.7", "a") == 204
    assert ask("billing", "1.1.2", "b") == 204
    assert ask("billing", "1.0.7", "c") == 412
    with pytest.raises(scope["sqlite3"].ProgrammingError):
        ask("billing", greatest, object())  # the work fails, so its token is not stored
    assert ask("billing", "1.1.2", "d") == 204
    bodies = scope["db"].execute("SELECT body FROM bills").fetchall()
    assert bodies == [("a",), ("b",), ("d",)]


def test_the_example_that_replays_a_seed_runs():
    (block,) = [b for b in PYTHON_BLOCKS if b.mark == "run: replay_seed"]
    scope = {}
    exec(compile(block.code, block.place, "exec"), scope)
    assert scope["report"].seed == 7


def test_security_options_are_accepted():
    (block,) = [b for b in PYTHON_BLOCKS if b.mark == "run: security"]
    scope = {}
    exec(compile(block.code, block.place, "exec"), scope)
    ConnectionConfig("broker-1:9092", options=scope["options"])


def test_the_example_with_a_mock_consumer_passes():
    (block,) = [b for b in PYTHON_BLOCKS if b.mark == "run: mock"]
    sizes = []

    def bill(consumer):
        for batch in consumer.batches():
            sizes.append(len(batch))
            batch.commit()

    exec(compile(block.code, block.place, "exec"), {"bill": bill})
    assert sizes == [2, 1]


def test_the_example_of_a_policy_conforms():
    (block,) = [b for b in PYTHON_BLOCKS if b.mark == "run: policy"]
    exec(compile(block.code, block.place, "exec"), {})


# --- Links ---------------------------------------------------------------------------

LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    return BLOCK.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {slug.replace(" ", "-") for slug in slugs}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_targets_of_links_exist(path):
    for target in LINK.findall(prose(path)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        aim = path.parent / name if name else path
        assert aim.exists(), target
        if anchor:
            assert anchor in anchors(aim), target


def test_paths_named_in_documents_exist():
    for path in DOCUMENTS:
        named = re.findall(
            r"`((?:tests|integration|marshal|cli|docs|tools)/[\w./]+)`", prose(path)
        )
        assert [name for name in named if not (ROOT / name).exists()] == [], path.name


# --- Commands ------------------------------------------------------------------------


def shell_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a shell block."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.wordchars += ":,@%+[]"
        words: list[str] = []
        for word in lexer:
            if set(word) <= set("|&;()<>"):
                yield words
                words = []
            else:
                words.append(word)
        yield words


def is_setting(word: str) -> bool:
    return re.fullmatch(r"[A-Z_]+=.*", word) is not None


def mentioned() -> Iterator[list[str]]:
    """Yield the words of every command in the documents."""
    for block in ALL_BLOCKS:
        if block.language == "sh":
            yield from shell_commands(block.code)
    for path in DOCUMENTS:
        for code in re.findall(r"`((?:marshal|make) [^`\n]+)`", prose(path)):
            if "..." not in code and "COMMAND" not in code:
                yield shlex.split(code)


def commands(program: str) -> list[list[str]]:
    """Return the arguments of every mention of a program."""
    found = []
    for words in mentioned():
        while words and is_setting(words[0]):
            words.pop(0)
        if words and Path(words[0]).name == program:
            found.append(words[1:])
    return found


MARSHAL = sorted(set(map(tuple, commands("marshal"))))


@pytest.mark.parametrize("words", MARSHAL, ids=" ".join)
def test_marshal_commands_parse(words):
    import typer

    from kafka_marshal_cli.assembly import app
    from kafka_marshal_cli.lazy import split

    command: Any = typer.main.get_command(app)
    context = None
    words = split(list(words), command.commands).joined
    while hasattr(command, "resolve_command") and words and words[0][0] != "-":
        context = command.context_class(command, info_name="marshal", parent=context)
        _, command, words = command.resolve_command(context, words)
        assert command is not None
    is_group = hasattr(command, "resolve_command")
    assert not is_group or words in ([], ["--help"], ["--version"])
    if not is_group and words and words != ["--help"]:
        command.make_context("marshal", words, parent=context)


def test_commands_of_the_simulator_parse():
    import typer

    from simulator.command import app

    command = typer.main.get_command(app)
    found = [words for words in commands("python") if words[:2] == ["-m", "simulator"]]
    assert found
    for words in found:
        command.make_context("simulator", words[2:])


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    used = {
        word
        for words in commands("make")
        for word in words
        if not is_setting(word) and word[0] != "-"
    }
    assert used
    assert used <= targets


# --- README.md, docs/reference.md ----------------------------------------------------

README_LINES_MAX = 250
IMAGE_BYTES_MAX = 200_000


def test_the_readme_is_short():
    assert len(README.splitlines()) <= README_LINES_MAX


def test_the_readme_names_the_command_that_ci_runs():
    (last,) = (ROOT / ".ci" / "run").read_text().splitlines()[-1:]
    commands = [line.partition("#")[0].strip() for line in README.splitlines()]
    assert last == "make test"
    assert last in commands


def test_pictures_of_the_readme_exist_and_are_small():
    shown = re.findall(r"!\[[^\]]+\]\((docs/images/[^)]+)\)", README)
    assert shown == ["docs/images/claims-watch.svg", "docs/images/audit-timeline.svg"]
    for path in (ROOT / "docs" / "images").iterdir():
        assert path.stat().st_size <= IMAGE_BYTES_MAX, path.name
    for name in shown:
        assert ET.parse(ROOT / name).getroot().tag.endswith("}svg")


def written(default: object) -> str:
    """Return a default as the documents write it."""
    return json.dumps(default) if isinstance(default, str) else str(default)


def listed_defaults(mark: str) -> dict[str, str]:
    item = r"^- (`.+?`) \((.+?)\):"
    return {
        name: default.strip("`")
        for heads, default in re.findall(item, marked(REFERENCE, mark), re.MULTILINE)
        for name in names(heads)
    }


def test_settings_of_a_client_are_listed_with_their_defaults():
    parameters = inspect.signature(Marshal.__init__).parameters.values()
    assert listed_defaults("list: settings of Marshal") == {
        each.name: "required" if each.default is each.empty else written(each.default)
        for each in parameters
        if each.name != "self"
    }


def test_settings_of_a_consumer_are_listed_with_their_defaults():
    values = (ConsumerConfig(topics=("t",)), Callbacks())
    defaults = {
        name: written(default)
        for value in values
        for name, default in attrs.asdict(value).items()
    }
    del defaults["starts"]  # for ranges only
    listed = listed_defaults("list: settings of consumer")
    assert listed == defaults | {"topics": "required", "timeout_ms": str(OPEN_MS_MAX)}


# --- PROTOCOL.md: records ------------------------------------------------------------


def fields(cell: str) -> list[str]:
    # The beats of a batch are a list of pairs, named within the same cell.
    return [name for name in names(cell.partition("array, at least one")[0]) if name]


def in_full(cell: str) -> str:
    """Return the fields of a record; replace *sender* and the like by their fields."""
    shorthands = items(PROTOCOL, "list: shorthands")
    while name := re.search(r"\*\w+\*", cell):
        cell = cell.replace(name[0], shorthands[name[0]])
    return cell


def record_rows() -> list[list[str]]:
    """Return number, name and fields of each record."""
    listed = items(PROTOCOL, "list: records")
    return [[*name.split(), in_full(cell)] for name, cell in listed.items()]


def test_record_kinds_are_listed_with_their_fields():
    listed = [(int(number), name, fields(cell)) for number, name, cell in record_rows()]
    real = [
        (
            kind.number,
            kind.name,
            [name for name in kind.record.__struct_fields__ if name != "tags"],
        )
        for kind in KINDS
    ]
    assert listed == real
    assert all(kind.record.__struct_fields__[-1] == "tags" for kind in KINDS)
    assert {kind.version for kind in KINDS} == {0}
    level_2 = [kind.number for kind in KINDS if kind.level == 2]
    assert level_2 == [7, 8, 9, 10, 11, 12, 15, 16, 17, 19, 20, 21, 22, 23, 24, 129]
    assert all(kind.level == 1 for kind in KINDS if kind.number not in level_2)


def test_nested_fields_are_listed():
    nested = items(PROTOCOL, "list: nested")
    listed = {name: names(in_full(cell)) for name, cell in nested.items()}
    assert listed == {
        "Resume": list(Resume.__struct_fields__),
        "Limits": list(Limits.__struct_fields__),
        "ScopedTopic": list(ScopedTopic.__struct_fields__),
        "PlannedTopic": list(PlannedTopic.__struct_fields__),
        "PlannedMember": list(PlannedMember.__struct_fields__),
        "ImportedKey": list(ImportedKey.__struct_fields__),
        "ImportedSettings": list(ImportedSettings.__struct_fields__),
        "ImportedDirective": list(ImportedDirective.__struct_fields__),
        "ImportedPrevious": list(ImportedPrevious.__struct_fields__),
        "StagedTopic": [*StagedTopic.__struct_fields__, "partition", "position"],
    }


def test_optional_fields_are_marked():
    for _, name, cell in record_rows():
        (record,) = [kind.record for kind in KINDS if kind.name == name]
        for field in msgspec.structs.fields(record):
            if field.name in {"tags", "beats"}:
                continue
            (word,) = re.findall(rf"`{field.name}` (\S+?)(?:,|$| of)", cell)
            is_optional = type(None) in getattr(field.type, "__args__", ())
            assert word.endswith("?") == is_optional, (name, field.name)


def test_limits_are_listed_with_their_defaults():
    listed = {
        names(name)[0]: int(re.split(r"\D", value)[0])
        for name, value in items(PROTOCOL, "list: limits").items()
    }
    assert listed == LIMIT_DEFAULTS


def test_settings_of_groups_are_listed_with_their_bounds():
    listed = {
        names(name)[0]: tuple(map(int, re.findall(r"\d+", value.partition(";")[0])))
        for name, value in items(PROTOCOL, "list: group settings").items()
    }
    assert listed == TUNABLES


def test_frame_limit_is_named():
    assert f"{FRAME_BYTES_MAX:,} bytes (48 KiB)" in PROTOCOL


def words_of_the_fold() -> set[str]:
    """Return the effects and reasons in the modules of the fold."""
    found = set()
    folds = (
        *("keys", "groups", "fences", "positions", "resets"),
        *("advice", "layouts"),
    )
    others = ("judging", "growths", "log_clock", "rationalizer")
    for name in (*others, *(f"fold_{each}" for each in folds)):
        tree = ast.parse((PACKAGE / "protocol" / f"{name}.py").read_text())
        asked = {
            node.args[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "limit"
        }
        found |= {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"[a-z_]+", node.value)
            and node not in asked
        }
    details = {"remaining_ms", "first", "last", "position", "generation", "partition"}
    return found - details


def test_effects_and_reasons_are_listed():
    effects = set(names(marked(PROTOCOL, "list: effects")))
    reasons = set(names(marked(PROTOCOL, "list: reasons")))
    outcome_words = {outcomes.UNDECODABLE, outcomes.HALTED}
    counted_only = {"timestamp_type", "skipped"}
    assert all(f"`{name}`" in PROTOCOL for name in counted_only)
    folded = words_of_the_fold() | outcome_words | {outcomes.SKIPPED}
    assert effects | reasons | counted_only == folded
    assert effects & reasons == {"paused"}, "one counter for two things"
    assert effects - reasons | {outcomes.SKIPPED} == EFFECTS, "not metrics of refusals"


def test_canonical_tuples_have_as_many_elements_as_the_code_writes():
    listed = items(PROTOCOL, "list: tuples")
    state = golden_world()
    _, header, keys, groups, operations = msgspec.msgpack.decode(to_bytes(state))
    real = {"header": header, "key": keys[0], "group": groups[0]}
    for name, item in real.items():
        assert listed[name].startswith(f'`"{name}"`')
        assert len(listed[name].partition(";")[0].split(", ")) == len(item)
    pause = next(group[2] for group in groups if group[2] is not None)
    pause_cell = listed["pause"].partition(";")[0]
    assert len(pause_cell.split(", ")) == len(pause)
    assert operations == []


def test_topic_settings_are_those_of_formatting():
    listed = {
        name: names(value)[0]
        for settings, value in items(PROTOCOL, "list: topic settings").items()
        for name in names(settings)
        if names(value)
    }
    assert listed == coordination_configs(3)


# --- PROTOCOL.md, tests/spec/golden.md: golden values --------------------------------


def golden_entries():
    lines = marked(GOLDEN, "golden: log").splitlines()
    return [object_to_entry(json.loads(line))[1] for line in lines]


def golden_world() -> WorldState:
    state = WorldState(0)
    for entry in golden_entries():
        apply(state, entry)
    return state


def test_the_state_of_the_golden_log_has_the_quoted_digest():
    assert digest(golden_world()) == marked(PROTOCOL, "golden: digest")


def test_the_state_of_the_golden_log_has_the_listed_bytes():
    text = "".join(marked(GOLDEN, "golden: bytes").split())
    assert to_bytes(golden_world()).hex() == text


def test_golden_frames_are_the_entries_of_the_golden_log():
    listed = rows(GOLDEN, "golden: frames")
    entries = golden_entries()
    assert [int(row[0]) for row in listed] == [entry.offset for entry in entries]
    for (_, name, frame), entry in zip(listed, entries, strict=True):
        value = bytes.fromhex(names(frame)[0])
        assert value == entry.value
        if name != "-":
            record = decode(value)
            assert kind_of(record).name == name
            assert encode(record) == value
    shown = {*range(1, 7), 13, 128}
    assert {row[1] for row in listed} - {"-"} == {
        kind.name for kind in KINDS if kind.number in shown
    }


def test_golden_transitions_are_those_of_the_fold():
    state = WorldState(0)
    expected_rows = [
        [
            str(one.offset),
            one.outcome,
            f"`{one.effect or one.reason}`",
            "-" if one.key is None else str(one.key.topic_partition),
            "-" if one.epoch is None else str(one.epoch),
            ", ".join(f"{name} {value}" for name, value in (one.detail or {}).items())
            or "-",
        ]
        for entry in golden_entries()
        for one in apply(state, entry)
    ]
    assert expected_rows == rows(GOLDEN, "golden: transitions")


def test_golden_digest_of_the_clauses_is_quoted():
    golden = json.loads((ROOT / "tests" / "spec" / "golden.json").read_text())
    assert f"`{golden['digest']}`" in PROTOCOL


def test_golden_placement_matches_the_hash_function():
    listed = rows(PROTOCOL, "golden: placement")
    assert listed
    for topic, partition, number, place in listed:
        text = f"{topic}\0{partition}".encode()
        assert mmh3.hash(text, 0, signed=False) == int(number)
        found = coordinating_partition(topic, int(partition), partition_count=50)
        assert found == int(place)


# --- docs/ARCHITECTURE.md, docs/reference.md ------------------------------------------


def test_the_tree_of_errors_is_that_of_the_code():
    tree = (errors.__doc__ or "").partition("::\n\n")[2].partition("\n\n")[0]
    base, *lines = [line.removeprefix("    ") for line in tree.splitlines()]
    parts = [line.partition("─ ") for line in lines]
    drawn = [(len(drawing) // 3, rest.split()[0]) for drawing, _, rest in parts]
    listed = re.findall(
        r"^( *)- `(\w+)`(.*)", marked(REFERENCE, "list: troubleshooting"), re.MULTILINE
    )
    assert [(len(indent) // 2, name) for indent, name, _ in listed] == drawn
    assert base.startswith("MarshalError ")
    for _, name, rest in listed:
        is_retriable = getattr(errors, name).retriable
        assert is_retriable == rest.startswith(", retriable"), name


def test_every_error_is_in_the_tree_and_public():
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert name in (errors.__doc__ or "")
            assert name in kafka_marshal.__all__


@cache
def calls_of_the_product() -> list[ast.Call]:
    trees = (ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return [node for node in nodes if isinstance(node, ast.Call)]


def strings_given(function: str, *, to: int = 0) -> set[str]:
    """Return the literals that the product passes to a function as this argument."""
    found = set()
    for node in calls_of_the_product():
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called == function and len(node.args) > to:
            argument = node.args[to]
            if isinstance(argument, ast.Constant):
                found.add(argument.value)
    return found


def test_events_are_listed_with_their_level():
    real = strings_given("observe") | strings_given("_observe")
    levels = {
        "error": logs._ERRORS,
        "warning": logs._WARNINGS,
        "info": real - logs._ERRORS - logs._WARNINGS,
    }
    for level, names_of in levels.items():
        listed = listed_names(ARCHITECTURE, f"list: events, {level}")
        assert len(set(listed)) == len(listed)
        assert set(listed) == names_of & real, level


def test_reasons_for_the_end_of_a_claim_are_listed():
    listed = set(listed_names(REFERENCE, "list: endings"))
    assert listed >= strings_given("Ending") | strings_given("Drain") | EXPECTED


# --- INTERNALS.md, CONTRIBUTING.md ---------------------------------------------------

INTERNALS = (ROOT / "docs" / "INTERNALS.md").read_text()
INTERNALS_WORDS_MAX = 1_800
FILE = re.compile(r"`([\w/]+\.py)`")
QUESTIONS = {
    "Where is a stale owner judged?": "_judge_known",
    "What stops a zombie?": "Lease",
    "Where would a new refusal go?": "judge_claim",
    "Who writes checkpoints?": "CheckpointBegin",
    "How does a Spark task get offsets at most once?": "ClaimRef",
}


def file_of(name: str) -> Path:
    """Return a file that INTERNALS names, below the package or the root."""
    (found,) = [path for path in (PACKAGE / name, ROOT / name) if path.is_file()]
    return found


def internals(heading: str) -> str:
    _, found, rest = INTERNALS.partition(f"## {heading}\n")
    assert found, heading
    return rest.partition("\n## ")[0]


def test_internals_are_short_and_have_three_drawings():
    assert len(INTERNALS.split()) <= INTERNALS_WORDS_MAX
    drawn = [b for b in ALL_BLOCKS if b.place.startswith("docs/INTERNALS.md")]
    assert len([b for b in drawn if b.language in {"", "mermaid"}]) == 3


def test_files_named_in_internals_exist():
    named = FILE.findall(INTERNALS)
    assert len(named) > len(QUESTIONS)
    for name in named:
        assert file_of(name)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_answer_to_a_question_names_a_file_with_the_code(question):
    _, found, rest = INTERNALS.partition(f"\n- {question} ")
    assert found
    answer = re.split(r"\n(?:- |\n)", rest)[0]
    files = [file_of(name) for name in FILE.findall(answer)]
    assert any(QUESTIONS[question] in path.read_text() for path in files)


def test_the_map_has_every_package_and_a_file_of_each():
    items = re.split(r"\n- ", internals("The map").partition("**Safety")[0])[1:]
    mapped = {
        item.partition(": ")[0].strip("`"): file_of(FILE.findall(item)[-1])
        for item in items
    }
    real = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(mapped) - {"top level", "cli/kafka_marshal_cli"} == real
    for name in real:
        assert (PACKAGE / name) in mapped[name].parents


def test_the_drawing_of_a_claim_has_the_phases_of_the_code():
    drawing = internals("The life of a claim").partition("```")[2].partition("```")[0]
    assert set(re.findall(r"\b[A-Z]{4,}\b", drawing)) == {each.name for each in Phase}


def test_methods_named_in_internals_exist():
    named = re.findall(r"`(Claim|Engine)\.(\w+)`", INTERNALS)
    assert len(named) >= 4
    for owner, name in named:
        text = (PACKAGE / "protocol" / "claiming.py").read_text()
        if owner == "Engine":
            text = (PACKAGE / "engine" / "engine.py").read_text()
        assert re.search(rf"def {name}\b|self\.{name} =", text), name


def test_paths_of_test_slices_exist():
    """Tests that a document runs by path; the paths come after `-m pytest`."""
    slices = [w for w in commands("python") if w[:2] == ["-m", "pytest"]]
    paths = [word for words in slices for word in words if word.startswith("tests/")]
    assert len(paths) >= 4
    assert [path for path in paths if not (ROOT / path).exists()] == []
