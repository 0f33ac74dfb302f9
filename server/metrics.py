"""Prometheus metrics: `lorakeet:*`, and the `vllm:*` names that fleet tools read.

The number of series is bounded: an adapter has its own while it is loaded and one of the first
`MAX_ADAPTER_LABELS`; all others count as "_other", which is no possible name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorakeet.configs.settings import Settings
from lorakeet.server.engine.messages import EngineInfo, EngineStats

MAX_ADAPTER_LABELS = 200
OTHER = "_other"

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 10)
_LOAD = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30)


class Metrics:
    def __init__(self, base_name: str) -> None:
        self._registry = CollectorRegistry()
        self._adapter_labels = {base_name}
        self.ttft = self._histogram("time_to_first_token_seconds", _LATENCY)
        self.inter_token = self._histogram("inter_token_latency_seconds", _TOKEN)
        self.queue_time = self._histogram("request_queue_time_seconds", _LATENCY)
        self.e2e = self._histogram("e2e_request_latency_seconds", _LATENCY)
        self.load_time = self._histogram("adapter_load_seconds", _LOAD, ["stage"])
        self.requests = self._counter("requests", "Requests by how they ended", ["outcome"])
        self._tokens = self._counter("tokens", "Tokens by adapter and kind", ["adapter", "kind"])

    def watch_engine(
        self,
        settings: Settings,
        info: EngineInfo,
        stats: Callable[[], EngineStats],
        adapter_ids: Callable[[], Mapping[str, int]],
    ) -> None:
        """Report the engine's latest statistics from now on; called once, when it is ready."""
        self._registry.register(_EngineCollector(settings, info, stats, adapter_ids))

    def adapter_loaded(self, name: str, seconds: Mapping[str, float]) -> None:
        for stage, value in seconds.items():
            self.load_time.labels(stage).observe(value)
        if len(self._adapter_labels) <= MAX_ADAPTER_LABELS:
            self._adapter_labels.add(name)

    def forget_adapter(self, name: str) -> None:
        """Remove its series: what its last requests still do counts as `OTHER`."""
        if name in self._adapter_labels:
            self._adapter_labels.discard(name)
            for kind in ("prompt", "generation"):
                self._tokens.remove(name, kind)

    def count_tokens(self, name: str, prompt: int, generated: int) -> None:
        label = name if name in self._adapter_labels else OTHER
        self._tokens.labels(label, "prompt").inc(prompt)
        self._tokens.labels(label, "generation").inc(generated)

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self._registry)

    def _histogram(
        self, name: str, buckets: tuple[float, ...], labels: Iterable[str] = ()
    ) -> Histogram:
        text = name.replace("_", " ")
        return Histogram(f"lorakeet:{name}", text, labels, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str, labels: Iterable[str]) -> Counter:
        return Counter(f"lorakeet:{name}", text, labels, registry=self._registry)


class _EngineCollector(Collector):
    """Gauges are read from the engine's statistics when they are asked for."""

    def __init__(
        self,
        settings: Settings,
        info: EngineInfo,
        stats: Callable[[], EngineStats],
        adapter_ids: Callable[[], Mapping[str, int]],
    ) -> None:
        self._settings = settings
        self._info = info
        self._stats = stats
        self._adapter_ids = adapter_ids

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        kv_usage = stats.kv_blocks_used / max(1, stats.kv_blocks_total)
        for prefix in ("lorakeet:", "vllm:"):
            yield _gauge(prefix + "num_requests_running", stats.num_running)
            yield _gauge(prefix + "num_requests_waiting", stats.num_waiting)
            yield _gauge(prefix + "kv_cache_usage_perc", kv_usage)
            yield _info(prefix + "cache_config_info", self._cache_config())
            yield _info(prefix + "lora_requests_info", self._lora_requests(stats))
        yield _gauge("lorakeet:lora_rows_used", stats.lora_rows_used)
        yield _gauge("lorakeet:lora_rows_total", stats.lora_rows_total)
        yield _gauge("lorakeet:lora_host_bytes", stats.lora_host_bytes)
        yield _gauge("lorakeet:lora_host_limit_bytes", self._info.lora_host_limit)
        yield _count("lorakeet:prefix_cache_queries", stats.prefix_cache_queries)
        yield _count("lorakeet:prefix_cache_hits", stats.prefix_cache_hits)
        yield _count("lorakeet:preemptions", stats.num_preemptions)
        yield _count("lorakeet:steps", stats.num_steps)
        memory = GaugeMetricFamily(
            "lorakeet:memory_bytes", "Device memory by part, of rank 0", labels=["part"]
        )
        for part, size in self._info.memory.items():
            memory.add_metric([part], size)
        yield memory

    def _cache_config(self) -> dict[str, str]:
        return {
            "block_size": str(self._info.block_size),
            "num_gpu_blocks": str(self._info.num_blocks),
            "enable_prefix_caching": str(self._settings.enable_prefix_caching),
            "gpu_memory_utilization": str(self._settings.gpu_memory_utilization),
        }

    def _lora_requests(self, stats: EngineStats) -> dict[str, str]:
        """Running: resident on the GPU and ready."""
        states = {state.adapter_id: state for state in stats.adapters}
        ids = self._adapter_ids()
        known = {name: states[id_] for name, id_ in ids.items() if id_ in states}
        running = sorted(name for name, a in known.items() if a.tier == "gpu")
        waiting = sorted(name for name, a in known.items() if a.tier != "gpu" and a.num_waiting)
        return {
            "max_lora": str(self._info.max_loras),
            "running_lora_adapters": ",".join(running),
            "waiting_lora_adapters": ",".join(waiting),
        }


def _gauge(name: str, value: float) -> Metric:
    return GaugeMetricFamily(name, name.partition(":")[2].replace("_", " "), value=value)


def _count(name: str, value: float) -> Metric:
    return CounterMetricFamily(name, name.partition(":")[2].replace("_", " "), value=value)


def _info(name: str, values: dict[str, str]) -> Metric:
    family = GaugeMetricFamily(name, name.partition(":")[2].replace("_", " "), labels=list(values))
    family.add_metric(list(values.values()), 1)
    return family
