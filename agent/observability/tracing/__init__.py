"""Recoveries as spans of OpenTelemetry: which span there is, and what brings them to a collector."""
