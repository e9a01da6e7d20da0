"""What the watermark lab is measured with."""
