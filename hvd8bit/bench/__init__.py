"""Benchmarks, and the hosts they run on."""
