"""Measure a server from outside: workloads, a streaming client, metrics, reports. Judges nothing."""
