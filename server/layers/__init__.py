"""The layers that decoders are made of: plain torch, each with a seam for a hand-written kernel (`kernel_layer`)."""
