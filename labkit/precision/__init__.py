"""FP8 as DeepSeek-V3 uses it: tiles, products, layers, and what stays high.

The letters of shapes are those of `labkit.model`; r and c are rows and columns.
"""

from labkit.precision.accumulate import fp22_mm
from labkit.precision.convert import Conversion, ConversionRow, convert
from labkit.precision.errors import QuantizationReport, quantization_error
from labkit.precision.faults import Fault, inject, reckless_plan
from labkit.precision.formats import FORMATS, Format
from labkit.precision.kept_formats import kept_formats
from labkit.precision.levels import LEVELS, modules_in_fp8, set_levels
from labkit.precision.limits import Limits
from labkit.precision.linear import Fp8Linear, Fp8Recipe
from labkit.precision.operators import Operator, operators
from labkit.precision.plan import PrecisionPlan, plan, speed_up
from labkit.precision.policies import POLICIES, Choice, PrecisionPolicy, Rule
from labkit.precision.products import Backend, choose_backend, fp8_mm, transposed
from labkit.precision.quantize import QTensor, QuantSpec, dequantize, quantize
from labkit.precision.scheduler import Decision, PrecisionScheduler, Verdict
from labkit.precision.signals import GemmSignal, SignalProbe, StepSignals
from labkit.precision.swiglu import Fp8Experts, Fp8MLP
from labkit.precision.transform import to_fp8, to_high
from labkit.precision.units import fp8_units

__all__ = [
    "FORMATS",
    "LEVELS",
    "POLICIES",
    "Backend",
    "Choice",
    "Conversion",
    "ConversionRow",
    "Decision",
    "Fault",
    "Format",
    "Fp8Experts",
    "Fp8Linear",
    "Fp8MLP",
    "Fp8Recipe",
    "GemmSignal",
    "Limits",
    "Operator",
    "PrecisionPlan",
    "PrecisionPolicy",
    "PrecisionScheduler",
    "QTensor",
    "QuantSpec",
    "QuantizationReport",
    "Rule",
    "SignalProbe",
    "StepSignals",
    "Verdict",
    "choose_backend",
    "convert",
    "dequantize",
    "fp8_mm",
    "fp8_units",
    "fp22_mm",
    "inject",
    "kept_formats",
    "modules_in_fp8",
    "operators",
    "plan",
    "quantization_error",
    "quantize",
    "reckless_plan",
    "set_levels",
    "speed_up",
    "to_fp8",
    "to_high",
    "transposed",
]
