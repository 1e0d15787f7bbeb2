"""Writers of models as programs that other runtimes execute: ONNX and StableHLO. There are no readers."""
