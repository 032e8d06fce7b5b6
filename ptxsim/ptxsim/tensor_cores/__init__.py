"""Matrix instructions: mma.sync, wgmma, tcgen05, and tensor memory."""
