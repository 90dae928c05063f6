"""The benchmark: loaders beside each other and beside what the machine allows. `penstock bench` runs it.

Needs numpy and torch, which `import penstock` does not: nothing outside this folder imports it but the command line,
when it is asked to.
"""
