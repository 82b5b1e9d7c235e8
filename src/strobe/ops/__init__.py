"""The ops that torch.library registers, and what torch's transforms make of them."""
