"""FP8 as DeepSeek-V3 uses it: tiles, products, layers, and what stays high.

The letters of shapes are those of `labkit.model`; r and c are rows and columns.
"""

from labkit.precision.accumulate import fp22_mm
from labkit.precision.convert import Conversion, ConversionRow, convert
from labkit.precision.errors import QuantizationReport, quantization_error
from labkit.precision.formats import FORMATS, Format
from labkit.precision.linear import Fp8Linear, Fp8Recipe
from labkit.precision.operators import Operator, operators
from labkit.precision.plan import PrecisionPlan, plan, speed_up
from labkit.precision.policies import POLICIES, Choice, PrecisionPolicy, Rule
from labkit.precision.products import Backend, choose_backend, fp8_mm, transposed
from labkit.precision.quantize import QTensor, QuantSpec, dequantize, quantize
from labkit.precision.swiglu import Fp8Experts, Fp8MLP
from labkit.precision.transform import to_fp8, to_high
from labkit.precision.units import fp8_units

__all__ = [
    "FORMATS",
    "POLICIES",
    "Backend",
    "Choice",
    "Conversion",
    "ConversionRow",
    "Format",
    "Fp8Experts",
    "Fp8Linear",
    "Fp8MLP",
    "Fp8Recipe",
    "Operator",
    "PrecisionPlan",
    "PrecisionPolicy",
    "QTensor",
    "QuantSpec",
    "QuantizationReport",
    "Rule",
    "choose_backend",
    "convert",
    "dequantize",
    "fp22_mm",
    "fp8_mm",
    "fp8_units",
    "operators",
    "plan",
    "quantization_error",
    "quantize",
    "speed_up",
    "to_fp8",
    "to_high",
    "transposed",
]
