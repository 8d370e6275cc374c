"""Recoveries as OpenTelemetry spans, and their export to a collector."""
