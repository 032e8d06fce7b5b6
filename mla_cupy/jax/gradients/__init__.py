"""Hand-written gradients: a module for each differentiable operation of `mla_cupy.ops`."""
