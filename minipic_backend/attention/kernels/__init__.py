"""Triton kernels; their launchers and what they mean are one folder up."""
