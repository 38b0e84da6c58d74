"""Decode routing: pure core (policies, ledger, routing core) and the thin shells around it."""
