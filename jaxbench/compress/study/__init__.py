"""What the compressor is measured beside."""
