"""Plain generation: prompts, conversations and files of requests, with native kernels or the framework's own."""
