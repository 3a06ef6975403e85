"""FP8 as DeepSeek-V3 uses it: narrow numbers in tiles with a scale each."""

from labkit.precision.formats import FORMATS, Format
from labkit.precision.quantize import QTensor, QuantSpec, dequantize, quantize

__all__ = ["FORMATS", "Format", "QTensor", "QuantSpec", "dequantize", "quantize"]
