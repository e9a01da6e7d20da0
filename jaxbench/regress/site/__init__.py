"""The pages of a history: written as a folder that opens anywhere, or served with what the machine does now."""
