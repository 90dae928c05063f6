"""Other loaders' interfaces on this engine: a program written for one of them changes its import and nothing else.

    from penstock.compat.instanttensor import safe_open
    from penstock.compat.fastsafetensors import SafeTensorsFileLoader, SingleGroup
    from penstock.compat.runai_model_streamer import SafetensorsStreamer

docs/compatibility.md says, name by name, what each does here and what is different on purpose. Neither the other loader
nor torch is imported until a tensor is asked for.
"""
