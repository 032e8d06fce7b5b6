"""The state spaces, and boxes of tensors in them: tensor maps, im2col, swizzles."""
