"""Any pair of models: is a JAX callable the same function as a PyTorch module, and which is faster?"""
