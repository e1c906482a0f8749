"""The dashboard asks only for what a queue tells, by labels that it has."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.observe.prometheus import exposition

ROOT = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
METRIC = re.compile(r"\btransferqueue_\w+")
SAMPLE = re.compile(r"^(transferqueue_\w+)(?:{(.*)})? ", re.MULTILINE)


@pytest.fixture(scope="module")
def dashboard():
    return json.loads((ROOT / "transferqueue.json").read_text())


@pytest.fixture(scope="module")
def told():
    """Names of all metrics, and the labels of those that have samples."""
    with tq.connect() as queue:
        pacing = tq.Pacing("train", batch_rows=4, max_staleness=1, channel="policy")
        table = queue.create_table("rollouts", tasks=[tq.Task("train", needs=["rewards"])], pacing=pacing)
        queue.weights("policy").publish(0, {"w": np.zeros(4, np.float32)})
        queue.weights("policy").applied(0)
        rows = table.put(rewards=np.arange(6, dtype=np.float32), policy_version=0)
        with table.lease("train", rows=2):
            pass
        table.drop(rows[5:], "too_long")
        with table.lease("train", rows=1):
            text = exposition(queue.stats()).decode()
    names = set(re.findall(r"# TYPE (\w+)", text))
    labels = {name: set(re.findall(r'(\w+)="', found)) for name, found in SAMPLE.findall(text)}
    return names, labels


def queries(dashboard):
    """Every query of a panel, and of a variable."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"], target["legendFormat"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"], ""


def test_every_metric_it_names_is_told(dashboard, told):
    asked = [METRIC.findall(query) for query, _ in queries(dashboard)]
    assert len(asked) > 20
    assert all(asked), "a query of nothing"
    assert {name for names in asked for name in names} - told[0] == set()


def test_every_label_it_shows_or_groups_by_is_one_of_the_metric(dashboard, told):
    for query, legend in queries(dashboard):
        labels = told[1].get(METRIC.search(query)[0], set()) | {"instance"}
        assert set(re.findall(r"{{(\w+)}}", legend)) <= labels | {"request"}, query
        assert set(re.findall(r"(\w+)=~", query)) <= labels, query
        grouped = re.search(r"by \(([\w, ]+)\)", query)
        assert set(grouped[1].split(", ") if grouped else ()) <= labels, query


def test_what_only_grows_is_shown_as_a_rate_and_nothing_else_is(dashboard):
    for query, _ in queries(dashboard):
        for name in [] if query.startswith("label_values") else METRIC.findall(query):
            assert (f"rate({name}" in query) == name.endswith("_total"), query


def test_panels_have_numbers_of_their_own_and_lie_in_the_grid(dashboard):
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    assert {panel["datasource"]["uid"] for panel in panels if "targets" in panel} == {"${datasource}"}


def test_the_scrape_is_one_of_a_page_with_the_token_of_the_metrics():
    yaml = pytest.importorskip("yaml")
    (job,) = yaml.safe_load((ROOT / "prometheus.yml").read_text())["scrape_configs"]
    assert job["authorization"] == {"credentials_file": "/run/transferqueue-tokens/metrics"}
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8787"]}]
