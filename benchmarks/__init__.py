"""Measurements of minifsdp beside other engines; each is run as `python -m benchmarks.NAME`."""
