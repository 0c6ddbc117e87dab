"""A Grafana dashboard of what the gateway and the home tell Prometheus."""

from pathlib import Path


def dashboard() -> str:
    """JSON to import; its data source is chosen there."""
    return Path(__file__).with_name("grafana.json").read_text(encoding="utf-8")
