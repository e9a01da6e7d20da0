"""The memory bank of one row in lists of vectors: what tests/memory/test_bank.py holds the arrays to."""

import numpy as np


def softmax(x, axis=-1):
    x = np.exp(x - x.max(axis=axis, keepdims=True))
    return x / x.sum(axis=axis, keepdims=True)


class Oracle:
    """One row's bank in lists of vectors."""

    def __init__(self, config, params):
        self.config, self.params = config, params
        self.recent, self.slots, self.mass, self.losses, self.evicted, self.compressed = [], [], [], [], 0, 0

    def heads(self, x, name):
        kernel = self.params[f"{name}_proj.kernel"]
        return (np.asarray(x) @ kernel).reshape(len(x), self.config.num_heads, self.config.head_dim)

    def attend(self, block, entries):
        query, key, value = self.heads(block, "q"), self.heads(entries, "k"), self.heads(entries, "v")
        weights = softmax(np.einsum("tnh,snh->nts", query, key) / np.sqrt(self.config.head_dim))
        return np.einsum("nts,snh->tnh", weights, value), weights

    def compress(self, block, mass):
        c, few = self.config, self.config.slots_per_block
        block = np.asarray(block)
        if c.compression == "most_used":
            return block[sorted(sorted(range(c.block_size), key=lambda i: (-mass[i], i))[:few])]
        if c.compression == "learned":
            return softmax(block @ self.params["compress.kernel"], axis=0).T @ block
        groups = [block[i * c.ratio : (i + 1) * c.ratio] for i in range(few)]
        if c.compression == "conv":
            return np.stack([group.reshape(-1) @ self.params["compress.kernel"] for group in groups])
        return np.stack([group.mean(axis=0) if c.compression == "mean" else group.max(axis=0) for group in groups])

    def allocate(self, fine):
        """Return the slots: a state that is less surprising than the limit joins the run before it."""
        limit, runs = self.config.min_surprise, []
        for before, state in zip([None, *fine], fine):
            if limit is not None and before is not None:
                cosine = before @ state / np.linalg.norm(before) / np.linalg.norm(state)
                if 1 - cosine <= limit:
                    runs[-1].append(state)
                    continue
            runs.append([state])
        return [np.mean(run, axis=0) for run in runs]

    def read(self, block):
        """Return the answers to a block of up to block_size tokens, and keep it if it is whole."""
        c, entries = self.config, self.recent + self.slots
        answer = np.zeros((len(block), c.num_heads, c.head_dim))
        use = np.zeros(len(entries))
        if entries:
            answer, weights = self.attend(block, entries)
            use = weights.mean(axis=0).sum(axis=0)
        if len(block) == c.block_size:
            mass = c.mass_decay * np.asarray(self.mass) + (1 - c.mass_decay) * use / c.block_size
            self.write(list(block), list(mass))
        return answer

    def write(self, block, mass):
        c, size = self.config, self.config.block_size
        recent, slots = mass[: len(self.recent)], mass[len(self.recent) :]
        if len(self.recent) == size * c.recent_blocks:
            oldest = self.recent[:size]
            new = self.allocate(self.compress(oldest, recent))
            self.compressed += size
            self.losses.append(np.mean((self.attend(block, oldest)[0] - self.attend(block, new)[0]) ** 2))
            self.recent, recent = self.recent[size:], recent[size:]
            self.slots, slots = self.slots + list(new), slots + [0.0] * len(new)
            surplus = max(len(self.slots) - c.memory_slots, 0)
            self.slots, slots, self.evicted = self.slots[surplus:], slots[surplus:], self.evicted + surplus
        self.recent, self.mass = self.recent + block, recent + [0.0] * size + slots

    def read_all(self, x):
        size = self.config.block_size
        return np.concatenate([self.read(x[i : i + size]) for i in range(0, len(x), size)])
