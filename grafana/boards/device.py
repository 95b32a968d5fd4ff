"""How much room is left, and what does the box feel?"""

from __future__ import annotations

from typing import Final

from grafana.panel import Board, Kind, Panel, Query, Unit
from grafana.promql import gauge, rate, ratio
from grafana.shapes import NO_DEVICE, TOKENS, time

MACHINE: Final = '"host_.+|gpu[0-9]+_.+"'

BOARD: Final = Board(
    "edgellm-device",
    "edgellm / Capacity and device",
    "How much room is left, and what does the box feel?",
    (
        time(
            "KV cache in use",
            {"{{instance}}": gauge("kv_cache_usage_perc", by="instance", agg="max")},
            "Tokens in the cache over its capacity (1 is full).",
            unit=Unit.RATIO,
            max_value=1,
        ),
        time(
            "Engine memory by kind",
            {"{{instance}} {{kind}}": gauge("memory_bytes", by="instance, kind", agg="max", match=f"kind!~{MACHINE}")},
            "What the engine reserved. It should be flat: everything is reserved at start.",
            unit=Unit.BYTES,
        ),
        time(
            "Machine memory",
            {"{{instance}} {{kind}}": gauge("memory_bytes", by="instance, kind", agg="max", match=f"kind=~{MACHINE}")},
            "Total and available. On unified memory the host's is the GPU's too.",
            unit=Unit.BYTES,
        ),
        time(
            "Power",
            {"{{instance}} {{rail}}": gauge("device_power_watts", by="instance, rail", agg="max")},
            "Per rail. The total rail contains the others.",
            unit=Unit.WATTS,
            when_empty=NO_DEVICE,
        ),
        time(
            "Energy per 1000 tokens",
            {"joules": ratio(f"1000 * {rate('device_energy_joules_total')}", TOKENS)},
            "Energy of the whole device over generated tokens, idle time included.",
            unit=Unit.JOULES,
            when_empty=NO_DEVICE,
        ),
        time(
            "Temperature",
            {"{{instance}} {{sensor}}": gauge("device_temperature_celsius", by="instance, sensor", agg="max")},
            "Per sensor.",
            unit=Unit.CELSIUS,
            when_empty=NO_DEVICE,
        ),
        time(
            "Utilisation",
            {"{{instance}} {{unit}}": gauge("device_utilization_ratio", by="instance, unit", agg="max")},
            "Share of time busy, as the driver reports it.",
            unit=Unit.RATIO,
            max_value=1,
            when_empty=NO_DEVICE,
        ),
        time(
            "Clocks",
            {"{{instance}} {{domain}}": gauge("device_clock_hertz", by="instance, domain", agg="max")},
            "A clock that falls under load is throttling.",
            unit=Unit.HERTZ,
            when_empty=NO_DEVICE,
        ),
        time(
            "Throttled",
            {"{{instance}} {{cause}}": gauge("device_throttled", by="instance, cause", agg="max")},
            "1 while the device holds its clocks back for this cause.",
            max_value=1,
            when_empty=NO_DEVICE,
        ),
        time(
            "Telemetry sources",
            {"{{instance}} {{source}}": gauge("telemetry_available", by="instance, source", agg="max")},
            "1 while the source answers. A missing source leaves its panels empty: absent is never 0.",
            max_value=1,
        ),
        Panel(
            "Power mode",
            Kind.STATES,
            (Query(gauge("device_power_mode", by="instance, mode", agg="max") + " > 0", "{{instance}} {{mode}}"),),
            "The mode that nvpmodel set: it caps clocks and power.",
            when_empty=NO_DEVICE,
        ),
    ),
)
