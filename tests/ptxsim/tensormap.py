class TensorMap: pass
