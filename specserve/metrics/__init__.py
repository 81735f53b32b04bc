"""What the front process tells of its work: Prometheus metrics and OpenTelemetry spans."""
