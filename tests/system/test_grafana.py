"""The dashboard and the alert rules ask for what a running cluster has, in valid PromQL."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster import ROOT, Cluster, until

DIRECTORY = ROOT / "scripts" / "grafana"
DASHBOARD = json.loads((DIRECTORY / "dashboard.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((DIRECTORY / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
# What Prometheus itself adds to what it scrapes.
ADDED = {"instance", "job"}
TARGETS = [
    pytest.param(target["expr"], target["legendFormat"], id=f"{panel['title']}, {target['refId']}")
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
] + [
    pytest.param(rule["expr"], json.dumps(rule["annotations"]), id=rule["alert"]) for rule in RULES
]
# The queries of the common dashboards of vLLM, and of the endpoint picker of the gateway API.
VLLM = [
    *(
        f"histogram_quantile(0.99, sum by(le, model_name) (rate(vllm:{name}_bucket[5m])))"
        for name in (
            "e2e_request_latency_seconds",
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "time_per_output_token_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
        )
    ),
    *(
        f"rate(vllm:{name}[5m])"
        for name in (
            "prompt_tokens_total",
            "generation_tokens_total",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "num_preemptions_total",
            "request_queue_time_seconds_sum",
            "request_prefill_time_seconds_sum",
            "request_decode_time_seconds_sum",
            "request_inference_time_seconds_sum",
        )
    ),
    *(
        f'vllm:{name}{{model_name="demo"}}'
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "gpu_cache_usage_perc",
        )
    ),
    "sum by(finished_reason) (increase(vllm:request_success_total[5m]))",
    'vllm:cache_config_info{num_gpu_blocks="64"}',
]


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """Names of series -> their labels, of a cluster that has had all kinds of traffic."""
    directory = tmp_path_factory.mktemp("grafana")
    args = ("--heartbeat-ms", "100", "--worker-args", "--num-blocks 256 --block-size 16")
    with Cluster(directory, executor="hash", local_prefill="auto", args=args) as cluster:
        serve(cluster)
        found: dict[str, set[str]] = {"up": set()}
        text = httpx.get(f"{cluster.http}/metrics", trust_env=False, timeout=60).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
        yield found


def serve(cluster: Cluster) -> None:
    url = f"{cluster.http}/v1/completions"
    body: dict[str, Any] = {"model": "demo", "prompt": [5] * 40, "ignore_eos": True}
    with httpx.Client(timeout=60, trust_env=False) as http:
        assert http.post(url, json=body | {"max_tokens": 8}).status_code == 200
        assert http.post(url, json=body | {"prompt": [5] * 9000}).status_code == 503
        long = body | {"max_tokens": 1500, "stream": True}

        def is_frame_dropped() -> bool:
            with http.stream("POST", url, json=long) as answer:
                next(answer.iter_lines())  # then the client goes, with tokens under way
            return "baton_frames_dropped_total{" in http.get(f"{cluster.http}/metrics").text

        until(is_frame_dropped, "a token of a request that was cancelled")
        with http.stream("POST", url, json=long) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(cluster.local_pids("decode", 0)[-1], signal.SIGKILL)
            assert "data: [DONE]" in list(lines)
        until(lambda: cluster.find("decode", 0), "the decode worker is back")
        # Without a prefill worker the decode worker does it.
        prefill = cluster.local_pids("prefill", 0)[-1]
        os.kill(prefill, signal.SIGSTOP)  # one that is killed is soon back
        until(lambda: cluster.find("prefill", 0, "lost"), "it is lost")
        assert http.post(url, json=body | {"max_tokens": 8}).status_code == 200
        os.kill(prefill, signal.SIGCONT)
    until(lambda: cluster.find("prefill", 0), "the prefill worker is back")


def check(expr: str, series: dict[str, set[str]], legend: str = "") -> None:
    """Assert that series and labels that a query and its legend name exist."""
    names = re.findall(r"(?<![\w:])((?:baton_|vllm:)[\w:]+|up\b)(?:\{([^}]*)\})?", expr)
    assert names, "it asks for no series"
    for name, selector in names:
        assert name in series, f"no series {name}"
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        labels |= {
            label
            for group in re.findall(r"\bby ?\(([^)]*)\)", expr)
            for label in re.findall(r"\w+", group)
        }
        assert labels <= series[name] | ADDED, f"{name} has {series[name]}"
    shown = set(re.findall(r"\{\{\s*(?:\$labels\.)?([a-z_]+)\s*\}\}", legend))
    kept = {
        label
        for group in re.findall(r"\bby ?\(([^)]*)\)", expr)
        for label in re.findall(r"\w+", group)
    }
    assert shown <= (kept or series[names[0][0]] | ADDED), f"the legend {legend!r} has more"


@pytest.mark.parametrize(("expr", "legend"), TARGETS)
def test_a_query_finds_its_series(expr: str, legend: str, series: dict[str, set[str]]) -> None:
    check(expr, series, legend)


@pytest.mark.parametrize("expr", VLLM)
def test_a_query_of_a_dashboard_of_vllm_finds_its_series(
    expr: str, series: dict[str, set[str]]
) -> None:
    check(expr, series)


def test_a_query_with_a_mistake_is_found(series: dict[str, set[str]]) -> None:
    for expr in ("baton_no_such", 'baton_blocks{sort="used"}', "sum by (lane) (baton_blocks)"):
        with pytest.raises(AssertionError):
            check(expr, series)
    with pytest.raises(AssertionError, match="legend"):
        check("sum by (role) (baton_blocks)", series, "{{rank}}")


def test_panels_have_numbers_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [
        (column, row)
        for place in (panel["gridPos"] for panel in panels)
        for column in range(place["x"], place["x"] + place["w"])
        for row in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(taken)) == len(taken) and max(column for column, _ in taken) < 24


def test_promtool_accepts_rules_and_queries(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: it is in Debian's package prometheus")
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    recorded = [
        {
            "record": f"dashboard:{number}",
            "expr": expr.replace("$__rate_interval", "1m").replace("$instance", ".*"),
        }
        for number, expr in enumerate(queries + VLLM)
    ]
    asked = tmp_path / "queries.yml"
    asked.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    for path, count in ((DIRECTORY / "rules.yml", len(RULES)), (asked, len(recorded))):
        run = subprocess.run(
            [promtool, "check", "rules", str(path)], capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert f"{count} rules found" in run.stdout
