"""What the machine says of itself: power, temperature, load, clocks, throttling, memory.

    Telemetry.read(now_s) ──▶ every Reader.read() ──▶ Samples ──▶ TelemetryReading ──▶ gauges (metrics module)

Nodes are found by what they call themselves (hwmon `name`, thermal zone `type`), never by number: numbers change
between boots. A node that cannot be read gives no sample; a source without any sample is unavailable. Nothing is ever
reported as 0 because it could not be read. No reader needs root and none writes.
"""

from edgellm_worker.telemetry.reading import Quantity, Sample, Source, TelemetryReading
from edgellm_worker.telemetry.telemetry import Telemetry

__all__ = ["Quantity", "Sample", "Source", "Telemetry", "TelemetryReading"]
