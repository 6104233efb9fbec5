"""Measurements of omni_fastshm beside its rivals; `docs/benchmarks.md` says how to run and read them."""
