"""Models out as programs that other runtimes execute: ONNX and StableHLO. Nothing here reads one back."""
