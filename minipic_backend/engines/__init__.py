"""Engines: what all do alike (`base`), and the embedded one (`embedded`, `driver`, `launch`).

Frameworks' models share engines: `shared`, `hold`. The remote engine has a package of its own,
`minipic_backend.remote`.
"""
