"""docs/cli.md is generated from the help text of every command."""

from pathlib import Path

from cli_reference import reference
from rich.text import Text
from typer.testing import CliRunner

from kafka_marshal_cli.assembly import app, complete_command

DOCUMENT = Path(__file__).parents[1] / "docs" / "cli.md"


def test_the_document_is_up_to_date():
    assert DOCUMENT.read_text(encoding="utf-8") == reference()


def test_commands_options_defaults_and_environment_are_listed():
    text = reference()
    assert "### `marshal groups pause GROUP`" in text
    assert "### `marshal groups release" not in text  # an alias, hidden
    assert "- `--delivery` `alo|amo` (`alo`): At least once, or at most once.\n" in text
    assert "(`localhost:9092`, `MARSHAL_BOOTSTRAP_SERVER`): " in text
    assert "- 6: the coordination topic was formatted for another cluster\n" in text
    assert "--debug" not in text


def section(command):
    _, found, rest = reference().partition(f"## `marshal {command}`\n")
    assert found, command
    return rest.partition("\n#")[0]


def test_shared_options_are_listed_once():
    text = reference()
    assert text.count("- `--transport` ") == text.count("- `--config` ") == 1
    assert "Without" not in section("doctor"), "it has all of them"
    tail = section("log tail")
    assert "\nWithout `--timeout`, `--output`.\n" in tail
    assert "- `--timeout` `MS`: With --follow" in tail
    assert "\nShared options: `--config`.\n" in section("config path")
    assert "\nNo shared options.\n" in section("topic random-id")


def test_repeated_options_are_described_once_and_then_only_named():
    text = reference()
    for name in ("as", "at", "dry-run", "open-timeout", "yes"):
        assert text.count(f"- `--{name}`") == 1, name
    assert "\nAlso: `--limit`, `--at`.\n" in section("groups history [GROUP]")
    assert "\nAlso: `--execute`, `--as`.\n" in section("groups adopt GROUP")
    describe = section("groups describe GROUP")
    assert "\nAlso: `--at`.\n" in describe
    assert "- `GROUP`" not in describe
    assert "- `--since` `TIME`: Only actions" in section("groups history [GROUP]"), (
        "a text of its own stays"
    )


def test_output_columns_are_explained_only_in_help_texts():
    text = reference()
    assert "List every claim with its owner" in text
    assert "LOG-END-OFFSET" not in text
    described = CliRunner().invoke(app, ["groups", "describe", "--help"]).stdout
    assert "LOG-END-OFFSET" in described


def test_options_of_another_command_are_referred_to():
    text = section("config show")
    assert "As for `marshal sidecar run`: `--socket-group`," in text
    assert "- `--tcp`" not in text
    assert "- `--tcp` `HOST:PORT` (`MARSHAL_SIDECAR_TCP`): " in section("sidecar run")


def helps(command):
    """Yield every help text of a command and of those below it."""
    yield command.help
    yield command.epilog
    for param in command.params:
        yield getattr(param, "help", None)
    for child in getattr(command, "commands", {}).values():
        yield from helps(child)


def test_no_help_text_loses_words_to_markup():
    found = [text for text in helps(complete_command()) if text]
    assert found
    assert [text for text in found if Text.from_markup(text).spans] == []
    output = CliRunner().invoke(app, ["spark", "--help"]).stdout
    assert "'kafka-marshal[spark]'" in output
    assert "'kafka-marshal[spark]'" in reference()


def test_no_line_ends_in_blanks():
    assert all(line == line.rstrip() for line in reference().splitlines())
