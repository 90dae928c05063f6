"""Checkpoints of random bytes: `synth` writes them, `layouts` has the layouts of public models, `sharding` their files.

`penstock synth` does, and the tests, the demo and the benchmark. It needs numpy, which `import penstock` does not.
"""
