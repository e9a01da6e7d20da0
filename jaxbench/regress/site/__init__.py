"""The pages of a history: written as a folder that opens anywhere, or served with live samples of the machine."""
