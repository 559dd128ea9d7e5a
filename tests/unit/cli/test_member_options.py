"""What a process is among the members of its group, by options, variables, profile."""

import typer
from typer.testing import CliRunner

from kafka_marshal.config import Membership
from kafka_marshal_cli.member_options import MEMBER
from kafka_marshal_cli.shared import Call, command

LABELS = {"rack": "r1", "replaces": "old"}


def asked(*arguments, env=None):
    app, found = typer.Typer(), []

    @app.command()
    @command(waits=False, answers=False, option_groups={"member": MEMBER})
    def ask(call: Call, *, member: Membership) -> None:
        found.append(member)

    outcome = CliRunner().invoke(app, arguments, env=env)
    return found[0] if found else outcome.stderr


def test_by_default_a_member_has_no_labels_and_may_plan():
    assert asked() == Membership()


def test_options_and_variables_are_the_same():
    given = Membership(labels=LABELS, can_plan=False, restarts=True)
    labels = "rack=r1, replaces=old"
    assert asked("--labels", labels, "--no-plan", "--restarts") == given
    names = {"MARSHAL_NO_PLAN": "1", "MARSHAL_RESTARTS": "true"}
    assert asked(env=names | {"MARSHAL_LABELS": labels}) == given


def test_a_profile_has_labels_as_a_list(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(
        "[default]\nlabels = ['rack=r1', 'replaces=old']\nrestarts = true\n"
    )
    found = asked("--config", str(file))
    assert found == Membership(labels=LABELS, restarts=True)


def test_a_label_without_a_name_is_refused():
    assert "--labels must be written name=value" in asked("--labels", "rack")
