"""Cache quantizers: pure functions with packed storage (base.py says how a cache calls them), one file a family."""

from jaxkv.interventions.quantizers.base import Packed, Quantizer, Window, nbytes, split_error
from jaxkv.interventions.quantizers.spec import CacheQuant, SideQuant, parse_cache_quant

__all__ = ["CacheQuant", "Packed", "Quantizer", "SideQuant", "Window", "nbytes", "parse_cache_quant", "split_error"]
