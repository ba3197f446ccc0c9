"""Absorbed-weight MLA attention, from a weight source to ONNX graphs with a latent cache."""

__version__ = "0.1.0"
