"""Implementations of attention by name, a file and a line each; all have the signature of `layers.Attend`."""

from jaxkv.models.layers import Attend, eager

ATTENTIONS: dict[str, Attend] = {
    "eager": eager,
}
OTHERS = tuple(ATTENTIONS)[1:]  # than the usual one, which --attention need not name
