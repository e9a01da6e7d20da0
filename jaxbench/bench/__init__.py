"""The comparison: measure every backend on the same model, with statistics that hold on a noisy machine."""
