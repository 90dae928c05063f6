"""Tests and measurements on a real GPU: `penstock selftest --gpu` runs them.

They need torch, numpy and pytest, which `import penstock` does not: nothing outside this folder imports it. Without a
GPU they are skipped. `results.py` writes the report, which is made to be sent: it names no user, host or folder.
"""
