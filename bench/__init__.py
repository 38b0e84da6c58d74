"""Benchmarks, one module each, reached as `eldr bench NAME`."""
