"""Tests and measurements that want a real GPU: `make test-hardware`, or from a kit (`make gpu-kit`).

They need penstock, torch, numpy and pytest, and nothing else of this repository. Without a GPU they are skipped.
"""
