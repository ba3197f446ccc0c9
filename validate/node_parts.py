"""TABLE: which part of a model a node of a decode graph belongs to, by the name that the exporter gave it.

The graph builder names a node for what it is, under the scopes of where it is: `layers/3/attn/core/past_scores`. ONNX
Runtime keeps the names of nodes that it fuses others into, with words of its own around them. What fits no row belongs
to the REST.
"""

from __future__ import annotations

import re

REST = "rest"
# part -> names in it, without layer and attention; the first that fits counts
TABLE = (
    ("embedding", r"flat_ids|(scaled_)?embedding"),
    ("attention projections", r"(query|row|output)/.*"),
    ("softmax and masks", r"core/(.*/)?\w*(softmax|mask|probs|join_scores|segment_rows)\w*"
                          r"|shared/\w*(visible|written|mask)\w*/.*"),  # masks are made once, for all attentions
    ("scores", r"core/(.*/)?(\w*(scores|queries)\w*|query(_4d)?)"),
    ("mix", r"core/(.*/)?\w*(mix|latent_columns)\w*"),
    ("scores to mix", r"core/(.*/)?attend"),  # one operator does it all
    ("cache rows", r"cache/.*|core/(.*/)?\w*(rows|clean|codes|latent|key_4d|columns|piece)\w*"),
    ("experts", r"(router|experts)/.*|post_mlp_norm"),
    ("feed-forward", r"(shared/|ffn_\d/)?(mlps?\..*|hidden(_sigmoid|_silu)?)|shared/with_shared"),
    ("norms and residuals", r"\w*norm(\.\d)?|\w+_residual|\w+_of_last|\w+_scaled"),
    ("positions", r"(shapes|rope|shared)/.*"),
    ("head", r"head(_fp32)?|logits_shape|all_logits"),
)
PARTS = (*(part for part, _ in TABLE), REST)
_PATTERNS = tuple((part, re.compile(pattern)) for part, pattern in TABLE)
_LAYER = re.compile(r"layers/\d+/(attn/(\d+/)?)?")
_FUSED = re.compile(r"(?:fused )?(.*?)(?:/\w*Fusion\w*/.*)?")


def exported_name(name: str) -> str:
    """A node of ONNX Runtime's graph by the name of the exported one that it was made of."""
    found = _FUSED.fullmatch(name)
    return found[1] if found else name


def part_of(name: str) -> str:
    """The part of a node, exported or ONNX Runtime's."""
    within = _LAYER.sub("", exported_name(name), count=1)
    return next((part for part, pattern in _PATTERNS if pattern.fullmatch(within)), REST)
