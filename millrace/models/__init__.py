"""Model folders, tokenizers and devices: what training and decoding share."""
