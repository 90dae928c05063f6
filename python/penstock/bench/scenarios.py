"""What is in the page cache before a load, and what is loaded.

| scenario | page cache before | what is loaded |
|---|---|---|
| `cold` | empty (checked), and a raw O_DIRECT read of the same files just before | tensors, any memory |
| `warm` | full (checked) | tensors, any memory: zero copy is what is compared |
| `private` | full | tensors in memory of their own |
| `load_into` | full | existing parameters whose pages are in use |
"""

from __future__ import annotations

SCENARIOS = ("cold", "warm", "private", "load_into")
