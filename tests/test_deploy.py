"""The files in ``deploy``: alerts, a dashboard, a systemd unit, a manifest.

Every expression parses and uses exported metrics and labels, every command parses
against the real command line, and Prometheus' own tool checks and tests the alerts.
"""

import configparser
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import debian_tools
import promql_parser
import pytest
import typer
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from slices import HANG_S

from kafka_marshal.engine.meters import Histogram
from kafka_marshal.observability.metrics import Kind, Scrape, described
from kafka_marshal.sidecar.config import SOCKET_BYTES_MAX, Settings
from kafka_marshal.sidecar.metrics import FAMILIES
from kafka_marshal.sidecar.probe import PLACES, TIMEOUT_S
from kafka_marshal.sidecar.server import CLOSE_MS, END_S_MAX
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.parsing import duration_ms
from kafka_marshal_cli.profiles import KEYS

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "marshal.rules.yml"
RULES_TEST = DEPLOY / "prometheus" / "marshal.rules.test.yml"
BOARD = DEPLOY / "grafana" / "marshal.json"
UNIT = DEPLOY / "systemd" / "marshal-sidecar.service"
PROFILES = DEPLOY / "systemd" / "marshal.toml"
MANIFEST = DEPLOY / "kubernetes" / "sidecar.yaml"

# Metrics of Prometheus and of its client library, with their labels.
STANDARD = {
    "up": {"job", "instance"},
    "process_cpu_seconds_total": set(),
    "process_resident_memory_bytes": set(),
}
# Labels that Prometheus adds to each series that it scrapes.
ADDED = {"job", "instance"}


def exported():
    """Return the labels of every series that a sidecar may export."""
    found = dict(STANDARD)
    for family in FAMILIES:
        labels = set(family.labels)
        if "group" in labels:
            labels.add("client")  # with ``client_label``
        if family.kind is Kind.HISTOGRAM:
            found[f"{family.name}_bucket"] = labels | {"le"}
            found[f"{family.name}_count"] = found[f"{family.name}_sum"] = labels
        else:
            found[family.name] = labels
    return found


EXPORTED = exported()


def check_expression(text):
    """Check that an expression uses exported metrics and labels; return the metrics."""
    names, matched = set(), set()

    def visit(node):
        if isinstance(node, promql_parser.VectorSelector):
            names.add(node.name)
            for matcher in node.matchers.matchers:
                matched.add((node.name, matcher.name))

    expression = promql_parser.parse(text)
    promql_parser.walk(expression, visit)
    assert names, text
    assert names <= EXPORTED.keys(), text
    for name, label in matched:
        assert label in EXPORTED[name] | ADDED, f"{name} has no label {label}"
    known = set().union(*(EXPORTED[name] for name in names)) | ADDED
    for grouped in re.findall(r"\b(?:by|on|ignoring|without) ?\(([^)]*)\)", text):
        labels = {label.strip() for label in grouped.split(",")}
        assert labels <= known, f"{text}: {labels - known}"
    return names


def check_command(words):
    """Parse the arguments of a command as the command itself would."""
    command = typer.main.get_command(app)
    context, words = None, list(words)
    while hasattr(command, "resolve_command"):
        context = command.make_context("marshal", words, parent=context)
        words = [*context._protected_args, *context.args]
        assert words, "a command is missing"
        _, command, words = command.resolve_command(context, words)
        assert command is not None
    command.make_context("marshal", words, parent=context)


# --- Alerts


def rules():
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.fixture(scope="session")
def promtool():
    return debian_tools.program("promtool", "prometheus")


def run(*command, text=None):
    done = subprocess.run(
        [str(each) for each in command],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_uses_exported_metrics_and_names_a_command(rule):
    check_expression(rule["expr"])
    assert rule["labels"]["severity"] in {"critical", "warning"}
    summary, description = (
        rule["annotations"][key] for key in ("summary", "description")
    )
    assert len(summary) < 120
    assert len(description) > 80
    for command in re.findall(r"\bmarshal [a-z]+(?: [a-z]+)?$", description):
        check_command(shlex.split(command)[1:])
    labels = set(re.findall(r"\$labels\.(\w+)", summary + description))
    kept = re.search(r"\bby \(([^)]*)\)", rule["expr"])
    if kept:
        assert labels <= {label.strip() for label in kept[1].split(",")}


def test_names_of_alerts_are_prefixed_and_unique():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) >= 15
    assert all(re.fullmatch(r"Marshal[A-Z]\w+", name) for name in names)


def test_the_rule_tests_make_each_alert_fire_and_be_silent():
    tests = yaml.safe_load(RULES_TEST.read_text())["tests"]
    fired, silent = set(), set()
    for test in tests:
        for case in test.get("alert_rule_test", ()):
            (fired if case["exp_alerts"] else silent).add(case["alertname"])
        for case in test.get("promql_expr_test", ()):
            if case["exp_samples"]:
                fired.update(re.findall(r'alertname="(\w+)"', case["expr"]))
        for series in test["input_series"]:
            check_expression(series["series"])
    every = {rule["alert"] for rule in rules()}
    assert fired == every
    assert silent == every


def test_prometheus_accepts_the_rules_and_their_tests(promtool):
    code, message = run(promtool, "check", "rules", RULES)
    assert code == 0, message
    code, message = run(promtool, "test", "rules", RULES_TEST)
    assert code == 0, message


def test_the_tests_of_the_rules_can_fail(promtool, tmp_path):
    """With each expression replaced by one that is never, or always, true."""
    for expression in ("vector(0) > 1", "vector(1)"):
        broken = yaml.safe_load(RULES.read_text())
        for group in broken["groups"]:
            for rule in group["rules"]:
                rule["expr"] = expression
        (tmp_path / RULES.name).write_text(yaml.safe_dump(broken))
        shutil.copy(RULES_TEST, tmp_path)
        code, message = run(promtool, "test", "rules", tmp_path / RULES_TEST.name)
        assert code != 0
        for rule in rules():
            assert rule["alert"] in message, rule["alert"]


def test_prometheus_accepts_the_names_of_metrics(promtool):
    scrape = Scrape(families=FAMILIES)
    for family in FAMILIES:
        labels = [f"{label}-1" for label in family.labels]
        if family.kind is Kind.HISTOGRAM:
            scrape.add_durations(family, labels, durations=Histogram((10, 20)))
        else:
            scrape.add(family, labels, value=1)

    class Whole:
        describe = staticmethod(lambda: described(FAMILIES))
        collect = staticmethod(scrape.families)

    registry = CollectorRegistry()
    registry.register(Whole)
    text = generate_latest(registry).decode()
    code, message = run(promtool, "check", "metrics", text=text)
    assert code == 0, message


# --- The dashboard


def board():
    return json.loads(BOARD.read_text())


def panels():
    return [panel for panel in board()["panels"] if panel["type"] != "row"]


def replaced(text):
    """Return an expression with its variables as Grafana fills them in."""
    text = text.replace("$__rate_interval", "5m")
    for name in ("group", "topic", "instance"):
        text = text.replace(f"${name}", ".*")
    assert "$" not in text, text
    return text


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_uses_exported_metrics_and_labels(panel):
    targets = panel["targets"]
    assert targets
    assert len({target["refId"] for target in targets}) == len(targets)
    for target in targets:
        check_expression(replaced(target["expr"]))
        labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        for name in re.findall(r"\b(?:marshal|kafka|process)_\w+", target["expr"]):
            assert labels <= EXPORTED[name] | ADDED
    assert panel["description"].endswith(".")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_a_dashboard_can_be_imported():
    found = board()
    assert found["id"] is None, "Grafana gives it one"
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", found["uid"])
    assert isinstance(found["schemaVersion"], int)
    assert {"title", "panels", "templating", "time", "tags"} <= found.keys()
    every = found["panels"]
    ids = [panel["id"] for panel in every]
    assert len(set(ids)) == len(ids)
    assert {panel["type"] for panel in every} == {
        *("row", "stat", "timeseries", "state-timeline", "table")
    }
    titles = [panel["title"] for panel in every]
    assert len(set(titles)) == len(titles)


def test_panels_do_not_overlap():
    places = [panel["gridPos"] for panel in board()["panels"]]
    for place in places:
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
    for one, two in itertools.combinations(places, 2):
        apart_x = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
        assert apart_x or apart_y


def test_dashboard_variables_are_used_and_query_exported_labels():
    listed = {each["name"]: each for each in board()["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]+)\b", json.dumps(board()["panels"])))
    assert used == listed.keys()
    for name, each in listed.items():
        if each["type"] == "query":
            metric, label = re.fullmatch(
                r"label_values\((\w+), (\w+)\)", each["definition"]
            ).groups()
            assert label == name
            assert label in EXPORTED[metric] | ADDED


def test_every_metric_is_on_the_dashboard_or_a_known_exception():
    shown = set()
    for panel in panels():
        for target in panel["targets"]:
            shown |= check_expression(replaced(target["expr"]))
    ours = {family.name for family in FAMILIES}
    reported = {re.sub(r"_(bucket|count|sum)$", "", name) for name in shown} | shown
    assert ours - reported == {
        "marshal_build_info",
        "marshal_claim_epoch",
        "marshal_plan_generation",  # what a plan moves is shown
        "marshal_consumer_lag_records",  # kafka_consumergroup_lag is shown
        "marshal_records_committed_total",
        "marshal_records_undecodable_total",
    }


# --- The unit of systemd


def unit():
    found = configparser.ConfigParser(
        strict=False, interpolation=None, comment_prefixes=("#",)
    )
    found.optionxform = str
    found.read_string(UNIT.read_text())
    return found


def seconds(text):
    assert text.isdecimal()
    return int(text)


def test_the_unit_has_the_settings_that_the_sidecar_needs():
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert service["NotifyAccess"] == "main"
    assert seconds(service["WatchdogSec"]) >= 10
    assert service["RuntimeDirectoryMode"] == "0700"
    assert service["StateDirectoryMode"] == "0700"
    assert service["KillMode"] == "mixed"
    assert service["Restart"] == "always"
    stop_s = Settings().drain_ms / 1000 + 2 * CLOSE_MS / 1000 + END_S_MAX
    assert seconds(service["TimeoutStopSec"]) > stop_s
    start_s = 2 * Settings().open_ms / 1000
    assert seconds(service["TimeoutStartSec"]) > start_s


def test_the_unit_does_not_hide_processes_of_clients():
    service = unit()["Service"]
    for setting in ("PrivateUsers", "PrivatePIDs", "ProtectProc", "ProcSubset"):
        assert setting not in service
    assert "AF_UNIX" in service["RestrictAddressFamilies"]
    assert service["NoNewPrivileges"] == "yes"
    assert service["ProtectSystem"] == "strict"


def test_environment_variables_of_the_unit_are_known_settings():
    found = dict(
        re.findall(r"^Environment=(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE)
    )
    known = re.findall(r'envvar="(\w+)"', _sources_of_the_command())
    assert found
    assert found.keys() <= set(known)
    runtime = unit()["Service"]["RuntimeDirectory"]
    socket = found["MARSHAL_SIDECAR_SOCKET"]
    assert socket == f"/run/{runtime}/sidecar.sock"
    state = unit()["Service"]["StateDirectory"]
    assert found["MARSHAL_STATE_DIR"] == f"/var/lib/{state}"


def _sources_of_the_command():
    folder = ROOT / "cli" / "kafka_marshal_cli"
    return "".join(path.read_text() for path in folder.rglob("*.py"))


def test_the_unit_starts_a_valid_command():
    program, *words = shlex.split(unit()["Service"]["ExecStart"])
    assert Path(program).name == "marshal"
    assert Path(words[1]).name == PROFILES.name
    words[1] = str(PROFILES)
    check_command(words)


def test_the_profile_of_the_unit_has_known_settings():
    found = tomllib.loads(PROFILES.read_text())
    settings = found["profiles"][found["profile"]]
    assert settings.keys() - {"options"} <= set(KEYS)
    commented = re.findall(r"^# ([a-z-]+) = ", PROFILES.read_text(), re.MULTILINE)
    assert set(commented) <= set(KEYS)


def test_systemd_analyze_accepts_the_unit(tmp_path):
    """Without systemd, only the form of the file is checked."""
    analyze = shutil.which("systemd-analyze")
    service = unit()["Service"]
    assert all(key[0].isupper() for key in service)
    if analyze is None:
        return
    text = UNIT.read_text()
    # With a program and a user that this machine has.
    text = re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", text)
    text = re.sub(r"(?m)^User=.*$", "User=root", text)
    copy = tmp_path / UNIT.name
    copy.write_text(text)
    code, message = run(analyze, "verify", "--recursive-errors=no", copy)
    assert code == 0, message
    assert UNIT.name not in message, message


# --- The manifest of Kubernetes


def documents():
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def pod():
    (deployment,) = [each for each in documents() if each["kind"] == "Deployment"]
    spec = deployment["spec"]
    assert spec["selector"]["matchLabels"].items() <= (
        spec["template"]["metadata"]["labels"].items()
    )
    return spec["template"]["spec"]


def sidecar():
    (found,) = pod()["initContainers"]
    return found


def environment(container):
    return {each["name"]: each.get("value") for each in container["env"]}


def test_the_container_is_a_native_sidecar_that_sees_the_pods_processes():
    assert sidecar()["restartPolicy"] == "Always"
    assert pod()["shareProcessNamespace"] is True


def test_both_containers_have_one_user_and_share_the_socket():
    security = pod()["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == security["fsGroup"]
    (application,) = pod()["containers"]
    for container in (application, sidecar()):
        assert "runAsUser" not in container["securityContext"]
    volumes = {each["name"]: each for each in pod()["volumes"]}
    mounts = {each["name"]: each["mountPath"] for each in application["volumeMounts"]}
    ours = {each["name"]: each["mountPath"] for each in sidecar()["volumeMounts"]}
    assert ours.keys() == volumes.keys()
    (shared,) = mounts.keys() & ours.keys()
    assert "emptyDir" in volumes[shared]
    assert mounts[shared] == ours[shared]
    socket = environment(sidecar())["MARSHAL_SIDECAR_SOCKET"]
    assert environment(application)["MARSHAL_SIDECAR_SOCKET"] == socket
    # Other users may enter the volume itself, so the socket's folder is below it.
    assert Path(socket).parent.parent == Path(ours[shared])
    assert len(socket) <= SOCKET_BYTES_MAX
    assert socket in MANIFEST.read_text().partition("Marshal(sidecar=")[2][:80]


def test_state_is_on_a_volume_and_the_root_file_system_is_read_only():
    ours = {each["mountPath"]: each["name"] for each in sidecar()["volumeMounts"]}
    state = environment(sidecar())["MARSHAL_STATE_DIR"]
    volumes = {each["name"]: each for each in pod()["volumes"]}
    # Other users may write to the volume itself, so the state's folder is below it.
    assert "emptyDir" in volumes[ours[str(Path(state).parent)]]
    assert sidecar()["securityContext"]["readOnlyRootFilesystem"] is True


def test_each_probe_runs_marshal_probe_with_its_question():
    for name, question in (
        ("startupProbe", "started"),
        ("readinessProbe", "ready"),
        ("livenessProbe", "live"),
    ):
        probe = sidecar()[name]
        assert probe["exec"]["command"] == ["marshal-probe", question]
        assert question in PLACES
        assert probe["timeoutSeconds"] > TIMEOUT_S, "it says why by itself"
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["marshal-probe"] == "kafka_marshal.sidecar.probe:main"


def test_the_sidecar_starts_a_valid_command_with_known_settings(tmp_path):
    program, *words = sidecar()["command"]
    assert program == "marshal"
    (config,) = [each for each in documents() if each["kind"] == "ConfigMap"]
    (name,) = config["data"]
    assert Path(words[1]).name == name
    (tmp_path / name).write_text(config["data"][name])
    check_command([words[0], str(tmp_path / name), *words[2:]])
    known = set(re.findall(r'envvar="(\w+)"', _sources_of_the_command()))
    assert environment(sidecar()).keys() <= known | {"POD_NAME"}


def test_the_grace_period_covers_the_handoff_and_the_drain():
    words = sidecar()["lifecycle"]["preStop"]["exec"]["command"]
    assert words[0] == "timeout"
    command = re.search(r"marshal ([^|]*)\|", words[-1])[1]
    check_command(shlex.split(command))
    drain_s = Settings().drain_ms / 1000 + 2 * CLOSE_MS / 1000 + END_S_MAX
    handoff_s = duration_ms("--timeout", draining()[-1]) / 1000
    grace_s = pod()["terminationGracePeriodSeconds"]
    assert grace_s > handoff_s + int(words[1]) + drain_s


def application():
    (found,) = pod()["containers"]
    return found


def draining():
    """Return the command that drains a pod before its application ends."""
    words = application()["lifecycle"]["preStop"]["exec"]["command"]
    return shlex.split(words[-1].partition("||")[0])


def test_a_pod_is_drained_by_its_name_before_its_application_ends():
    program, *words = draining()
    assert program == "marshal"
    check_command(words)
    assert words[:3] == ["clients", "drain", "$POD_NAME"]
    assert environment(sidecar())["MARSHAL_CLIENT_ID"] == "$(POD_NAME)"
    fields = {each["name"]: each.get("valueFrom") for each in application()["env"]}
    assert fields["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    (config,) = [each for each in documents() if each["kind"] == "ConfigMap"]
    servers = environment(application())["MARSHAL_BOOTSTRAP_SERVER"]
    assert servers in config["data"]["marshal.toml"]
    # The drain outlasts the wait for it, and ends by itself soon after.
    for_ms = duration_ms("--for", words[words.index("--for") + 1])
    assert for_ms > duration_ms("--timeout", words[-1])


def test_shell_commands_of_the_manifest_have_valid_syntax():
    for container in (application(), sidecar()):
        words = container["lifecycle"]["preStop"]["exec"]["command"]
        code, message = run("sh", "-n", "-c", words[-1])
        assert code == 0, message
