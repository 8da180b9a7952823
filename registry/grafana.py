"""The Grafana dashboard of a served bundle, by Grafana's own builders.

Metrics are those that vLLM 0.32 exposes by these names; a test holds them to its source.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from registry.deployment import Deployment

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.timeseries import Panel as PanelBuilder

OF_MODEL = 'model_name="$model_name",instance=~"$instance"'
WIDTH, HEIGHT = 8, 8
QUANTILES = (0.5, 0.95, 0.99)
SECONDS, SHARE, PER_SECOND, BYTES, COUNT = "s", "percentunit", "reqps", "bytes", "short"


def dashboard(deployment: Deployment) -> str:
    """`grafana-dashboard.json`, as Grafana imports it."""
    from grafana_foundation_sdk.builders.dashboard import (
        Dashboard,
        DatasourceVariable,
        QueryVariable,
    )
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import (
        DataSourceRef,
        VariableOption,
        VariableRefresh,
    )

    source = DataSourceRef(type_val="prometheus", uid="${datasource}")
    model = VariableOption(text=deployment.model, value=deployment.model, selected=True)
    made = (
        Dashboard(f"vLLM: {deployment.model}")
        .uid(deployment.name)
        .description(
            f"rendered, not run. Bundle {deployment.bundle.digest}, gated with vLLM "
            f"{deployment.bundle.engine_version} on {deployment.gated_on}."
        )
        .tags(["pilotage", "vllm"])
        .editable()
        .refresh("30s")
        .time("now-3h", "now")
        .with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            QueryVariable("model_name")
            .label("served model")
            .datasource(source)
            .query("label_values(vllm:num_requests_running, model_name)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .current(model)
        )
        .with_variable(
            QueryVariable("instance")
            .label("server")
            .datasource(source)
            .query('label_values(vllm:num_requests_running{model_name="$model_name"}, instance)')
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    )
    for panel in _panels():
        made = made.with_panel(panel.datasource(source))
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _panels() -> list[PanelBuilder]:
    return [
        _quantiles("Time to first token (TTFT)", "vllm:time_to_first_token_seconds"),
        _quantiles("Time per output token (TPOT)", "vllm:request_time_per_output_token_seconds"),
        _quantiles("Whole request (E2EL)", "vllm:e2e_request_latency_seconds"),
        _panel(
            "Requests running and waiting",
            COUNT,
            ("running", _sum("vllm:num_requests_running")),
            ("waiting", _sum("vllm:num_requests_waiting")),
        ),
        _quantiles("Time in the queue", "vllm:request_queue_time_seconds"),
        _panel(
            "Requests per second by how they ended",
            PER_SECOND,
            (
                "{{finished_reason}}",
                f"sum by (finished_reason) ({_rate('vllm:request_success_total')})",
            ),
        ),
        _panel(
            "KV cache in use",
            SHARE,
            ("{{instance}}", f"max by (instance) (vllm:kv_cache_usage_perc{{{OF_MODEL}}})"),
            note="The share of the cache that requests hold. The memory itself is taken at the "
            "start.",
        ),
        _panel(
            "Prefix cache hit rate",
            SHARE,
            ("hits", _ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")),
            note="Prompt tokens found in the cache, as a share of those looked up.",
        ),
        _panel(
            "Preemptions per second",
            COUNT,
            ("preemptions", f"sum({_rate('vllm:num_preemptions_total')})"),
            note="Requests put back for want of KV cache. At the gate there should be none.",
        ),
        _panel(
            "Draft tokens accepted",
            SHARE,
            (
                "accepted",
                _ratio(
                    "vllm:spec_decode_num_accepted_tokens_total",
                    "vllm:spec_decode_num_draft_tokens_total",
                ),
            ),
            note="Empty where the bundle has no draft.",
        ),
        _panel(
            "Acceptance length",
            COUNT,
            (
                "tokens per step",
                "1 + "
                + _ratio(
                    "vllm:spec_decode_num_accepted_tokens_total",
                    "vllm:spec_decode_num_drafts_total",
                ),
            ),
            note="Tokens that one step of the target yields, its own included.",
        ),
        _panel(
            "Memory of the server's front process",
            BYTES,
            ("{{instance}}", 'process_resident_memory_bytes{instance=~"$instance"}'),
            note="Only the process that answers HTTP. Where the engine runs in processes of its "
            "own, theirs is in the container's memory, which the readiness probe looks at.",
        ),
    ]


def _quantiles(title: str, histogram: str) -> PanelBuilder:
    buckets = f"sum by (le) ({_rate(histogram + '_bucket')})"
    return _panel(
        title,
        SECONDS,
        *((f"P{share * 100:g}", f"histogram_quantile({share}, {buckets})") for share in QUANTILES),
    )


def _panel(title: str, unit: str, *lines: tuple[str, str], note: str = "") -> PanelBuilder:
    from grafana_foundation_sdk.builders.prometheus import Dataquery
    from grafana_foundation_sdk.builders.timeseries import Panel

    panel = Panel().title(title).unit(unit).span(WIDTH).height(HEIGHT).min(0)
    if note:
        panel = panel.description(note)
    names: Sequence[str] = "ABCDEFGH"
    for name, (legend, query) in zip(names, lines, strict=False):
        panel = panel.with_target(
            Dataquery().ref_id(name).expr(query).legend_format(legend).range()
        )
    return panel


def _rate(counter: str) -> str:
    return f"rate({counter}{{{OF_MODEL}}}[$__rate_interval])"


def _sum(gauge: str) -> str:
    return f"sum({gauge}{{{OF_MODEL}}})"


def _ratio(part: str, whole: str) -> str:
    return f"sum({_rate(part)}) / sum({_rate(whole)})"
