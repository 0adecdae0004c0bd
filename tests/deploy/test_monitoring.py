"""Prometheus's own checker reads what is deployed, and Grafana's own types the dashboard. Neither of them runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboards" / "sottovoce.json").read_text())

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (prometheus)")


def promtool(*arguments: str | Path) -> str:
    """Run the checker; return what it says. Fails the test with that if it objects."""
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_reads_its_configuration_and_all_alerts() -> None:
    said = promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
    assert f"{len(rules)} rules found" in said


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    tests = Path(__file__).with_name("alerts.yml")
    promtool("test", "rules", tests)
    tried = set(re.findall(r"alertname: (\w+)", tests.read_text()))
    assert tried == set(re.findall(r"alert: (\w+)", (DEPLOY / "prometheus" / "alerts.yml").read_text()))


@needs_promtool
def test_every_expression_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    assert len(expressions) > 15
    # Grafana puts what is chosen in the place of its variables.
    filled = [re.sub(r"\$\w+", ".*", each) for each in expressions]
    rules = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(filled)]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", file)


def test_the_dashboard_loses_nothing_in_grafanas_own_types() -> None:
    register_default_plugins()  # The types of the panels and of Prometheus's queries.
    assert lost(DASHBOARD, json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))) == []


def lost(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """Return where a document holds something that another does not."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [place for key in ours for place in lost(ours[key], theirs.get(key), f"{at}.{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [place for number, pair in pairs for place in lost(*pair, f"{at}[{number}]")]
    return [] if ours == theirs else [at]


def test_panels_ask_the_data_source_that_is_provisioned() -> None:
    provisioned = yaml.safe_load((DEPLOY / "grafana" / "datasources" / "prometheus.yml").read_text())["datasources"]
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert [each["url"] for each in provisioned] == ["http://prometheus:9090"]
    assert "prometheus" in service
    asked = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]}
    assert asked == {each["uid"] for each in provisioned}
