"""Eager references of one MLA attention and of whole decoders, against which every exported graph is judged.

They are independent on purpose. They share the configuration and the raw weights with the exporter and nothing else:
they read checkpoints with another library, split the projections themselves, derive inverse frequencies and softmax
scale again, and rotate in float64. A wrong scale, a swapped RoPE layout or a `kv_b` split the wrong way round in the
exporter is therefore a difference here; with shared code it would be the same fault on both sides, and agree.
`tests/test_references.py` holds the import boundary, and holds the references themselves against transformers.
"""

from validate.references.absorbed import AbsorbedMLA
from validate.references.base import Reference
from validate.references.decoder import Answer, DecoderReference, Prompt, Run
from validate.references.decoder_tensors import QuantisedError
from validate.references.expanding import ExpandingMLA
from validate.references.mha import ComposedMHA
from validate.references.naive import NaiveMLA
from validate.references.source import load_tensors

__all__ = ["AbsorbedMLA", "Answer", "ComposedMHA", "DecoderReference", "ExpandingMLA", "NaiveMLA", "Prompt",
           "QuantisedError", "Reference", "Run", "load_tensors"]
