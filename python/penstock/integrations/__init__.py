"""Serving engines: their own loaders say which bytes go where, and one load brings them there.

`penstock.integrations.vllm` and `penstock.integrations.sglang` are plugins that the engines find by themselves.
`penstock.integrations.tgis` is a class for engines that ask for shards by name. See docs/engines.md.
"""
