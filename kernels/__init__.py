"""Kernels of the engine. Kept free of logic: a distribution named `kernels` exists that transformers looks for."""
