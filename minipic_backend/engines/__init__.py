"""Engines: what all do alike (`base`), and the embedded one (`embedded`, `driver`, `launch`).

The remote engine has a package of its own, `minipic_backend.remote`.
"""
