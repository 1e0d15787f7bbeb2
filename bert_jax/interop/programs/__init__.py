"""Writers of models as programs that other runtimes execute: ONNX and StableHLO. There are no readers."""

from bert_jax.interop.programs.onnx_graph import check_onnx, write_calibration, write_onnx
from bert_jax.interop.programs.stablehlo import check_stablehlo, write_stablehlo

__all__ = ["check_onnx", "check_stablehlo", "write_calibration", "write_onnx", "write_stablehlo"]
