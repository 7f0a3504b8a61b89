"""The bundled engine: prefill and decode that use the store as it should be used.

Read in this order: `config.py` and `model.py` (one forward pass), `pool.py` and `hbm.py` (paged KV as a
tier), `loading.py` and `saving.py` (the daemon), `scheduler.py`, `step.py` and `engine.py`.
"""
