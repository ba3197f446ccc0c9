"""A trained MHA or GQA attention as MLA: which key columns stay rotary, and a joint low rank for all else.

**Rotary part.** Llama turns all columns of every key head. With n = head_dim / 2 pairs as complex numbers, key head g
at position s is k[g, i] e^(j f_i s), and a query head h of group g at t scores Re sum_i conj(q[h, i]) k[g, i] e^(j f_i
(s - t)). MLA has one rotary key of d_r columns for all heads. Let its pairs be z_(i, u) = u^H k[:, i], turned by f_i, u
a unit vector over the G key heads, and let the query head hold conj(u[g]) q[h, i] there. Over a whole basis k[:, i] =
sum_u u z_(i, u), and a rotation by f_i commutes with any mix of the heads' i-th pairs: the score is the same. So d_r =
G head_dim holds everything, **exactly** (the basis is then the heads themselves, and a query has zeros where other
heads lie). The price: queries d_r wide, H d_r x D weights; and a row of G head_dim numbers beside the latent, which
serves v alone.

With fewer columns, the basis of each frequency is the principal axes of its keys' second moments E[k k^H] (biases
included: a turned bias depends on position), and those pairs are kept that have most |z|^2 |q|^2 (1 - mean cos f s):
the key's energy times that of the queries that meet it, times what standing still would cost at this frequency over the
context. How many axes a frequency keeps is the model's, the axes are each layer's. The rest, k_rest = (1 - sum u u^H)
k, loses its position: it becomes the head's k_nope, met by the query unturned. That is the lossy step (TransMLA, arXiv
2502.07864, mixes key heads in the same way; MHA2MLA, 2502.14837, chooses pairs head by head). A bias of k_nope adds the
same to every score and falls out.

**Latent.** k_nope and v of all G heads are M x + const, M = [a W_k_rest; W_v] [rows, D], a balancing their mean
squares. The best factors of rank d_c under the activations' covariance C are U U^T M, U the first left singular vectors
of M C^(1/2): the latent is U^T M x, W_UK and W_UV are U's rows (K's over a), the mean's error goes into v's bias.
Without activations C = 1. Full rank is min(D, rank M): G head_dim where all pairs are rotary, towards 2 G head_dim
where few are.

Query columns carry sqrt((nope + d_r) / head_dim), so that MLA's own softmax scale gives 1 / sqrt(head_dim).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exporter.llama import HeadWeights, LlamaConfig, Projection, causal_attention, rotate

_RIDGE = 1e-6  # of C's mean, added to it: directions that calibration never saw keep their place in the range of M


@dataclass(frozen=True)
class Moments:
    """Mean [D] and covariance [D, D] of an attention's input. Without calibration: 0 and 1."""

    mean: np.ndarray
    covariance: np.ndarray

    @classmethod
    def unknown(cls, size: int) -> Moments:
        """Of inputs about which nothing is known."""
        return cls(np.zeros(size), np.eye(size))

    @classmethod
    def of(cls, x: np.ndarray) -> Moments:
        """Of tokens [N, D]."""
        mean = x.mean(axis=0)
        covariance = (x - mean).T @ (x - mean) / len(x)
        return cls(mean, covariance + _RIDGE * np.trace(covariance) / len(mean) * np.eye(len(mean)))


@dataclass(frozen=True)
class Shape:
    """The shape that all layers share: `kept` [n], how many of a frequency's G axes are rotary, and the rank d_c."""

    config: LlamaConfig
    kept: np.ndarray
    rank: int

    @property
    def whole(self) -> bool:
        """Whether every pair of every key head is rotary."""
        return bool((self.kept == self.config.num_key_value_heads).all())

    @property
    def rotary(self) -> int:
        """d_r."""
        return 2 * int(self.kept.sum())

    @property
    def still(self) -> np.ndarray:
        """Frequencies of which a part became position-free."""
        return np.flatnonzero(self.kept < self.config.num_key_value_heads)

    @property
    def nope(self) -> int:
        """Columns of k_nope: two per frequency that is not rotary as a whole; where there is none, one of zeros."""
        return 2 * len(self.still) or 1

    @property
    def inv_freq(self) -> np.ndarray:
        """[d_r / 2]: heads side by side where all is rotary, else frequency by frequency."""
        c = self.config
        return np.tile(c.inv_freq, c.num_key_value_heads) if self.whole else np.repeat(c.inv_freq, self.kept)

    @property
    def full_rank(self) -> int:
        """The rank from which on nothing of k_nope and v is lost."""
        return min(self.config.hidden_size, 2 * self.config.kv_columns - self.rotary)


@dataclass(frozen=True)
class MLAWeights:
    """One converted attention, float64, under MLA's names: [out, in] weights and their biases.

    `rotary_share`: how much of the keys' energy is in the rotary columns; `latent_share`: how much of k_nope's and v's,
    balanced, is in the latent.
    """

    q: np.ndarray
    q_bias: np.ndarray
    kv_a: np.ndarray
    kv_a_bias: np.ndarray
    kv_b: np.ndarray
    kv_b_bias: np.ndarray
    rotary_share: float
    latent_share: float


def _pairs(p: Projection) -> tuple[np.ndarray, np.ndarray]:
    """Columns i and i + n of every head as complex numbers: weight [heads, n, D], bias [heads, n]."""
    n = p.weight.shape[1] // 2
    return p.weight[:, :n] + 1j * p.weight[:, n:], p.bias[:, :n] + 1j * p.bias[:, n:]


def _columns(pairs: np.ndarray, axis: int) -> np.ndarray:
    """Complex pairs as columns again, all real parts before all imaginary ones."""
    return np.concatenate([pairs.real, pairs.imag], axis=axis)


@dataclass(frozen=True)
class Axes:
    """`vectors` [n, G, G]: for each frequency a basis of the G key heads in its columns, the most needed axis first;
    `need` [n, G] (what it would cost to let the axis stand still, as a share of all), `energy` [n, G] of the keys."""

    vectors: np.ndarray
    need: np.ndarray
    energy: np.ndarray


def principal_axes(w: HeadWeights, m: Moments, c: LlamaConfig) -> Axes:
    """The axes of one attention."""
    G, n = c.num_key_value_heads, c.head_dim // 2
    k, k_bias = _pairs(w.k)
    q, q_bias = _pairs(w.q)
    mean = np.einsum("gid,d->ig", k, m.mean) + k_bias.T  # [n, G]
    seen = np.einsum("gid,hid->igh", (k.reshape(G * n, -1) @ m.covariance).reshape(k.shape), k.conj())
    energy, vectors = np.linalg.eigh(seen + mean[:, :, None] * mean[:, None].conj())  # [n, G], [n, G, G]
    energy = energy.clip(0)
    q_mean = np.einsum("hid,d->hi", q, m.mean) + q_bias
    q_seen = np.einsum("hid,hid->hi", (q.reshape(len(q) * n, -1) @ m.covariance).reshape(q.shape), q.conj()).real
    per_group = (q_seen + np.abs(q_mean) ** 2).reshape(G, -1, n).sum(axis=1)  # [G, n]
    met = np.einsum("gi,igu->iu", per_group, np.abs(vectors) ** 2)
    distances = np.arange(min(c.max_position_embeddings, 1 << 15))
    cost = np.array([1 - np.cos(distances * f).mean() for f in c.inv_freq])
    need = energy * met * cost[:, None]
    order = np.argsort(-need, axis=1, kind="stable")
    return Axes(np.take_along_axis(vectors, order[:, None], axis=2),
                np.take_along_axis(need, order, axis=1) / max(need.sum(), np.finfo(float).tiny),
                np.take_along_axis(energy, order, axis=1))


def choose(need: np.ndarray, pairs: int) -> np.ndarray:
    """How many axes each frequency keeps, [n], of `need` [n, G] over all layers: the `pairs` that need it most."""
    kept = np.zeros(len(need), np.int64)
    for place in np.argsort(-need, axis=None, kind="stable")[:pairs]:
        kept[place // need.shape[1]] += 1
    return kept


@dataclass(frozen=True)
class _Factors:
    """k_nope and v over each other, [rows, D], factored: what every rank is a part of. `balance` is that of k_nope."""

    stacked: np.ndarray
    left: np.ndarray
    sizes: np.ndarray
    keys: int  # rows of k_nope
    balance: float

    @classmethod
    def of(cls, rest: np.ndarray, v: Projection, m: Moments) -> _Factors:
        """Of the position-free keys (pairs [G, still, D]) and the values."""
        D = v.weight.shape[2]
        key, value = _columns(rest, 1).reshape(-1, D), v.weight.reshape(-1, D)
        energy = [float(np.einsum("rd,rd->", part @ m.covariance, part)) for part in (key, value)]
        balance = (energy[1] / energy[0]) ** 0.5 if min(energy) > 0 else 1.0
        stacked = np.concatenate([balance * key, value])
        root = stacked
        if not np.array_equal(m.covariance, np.eye(D)):
            spectrum, turned = np.linalg.eigh(m.covariance)
            root = stacked @ turned * np.sqrt(spectrum.clip(0))
        left, sizes, _ = np.linalg.svd(root, full_matrices=False)
        return cls(stacked, left, sizes, len(key), balance)

    def share(self, rank: int) -> float:
        """Of the energy that `rank` holds."""
        total = float((self.sizes**2).sum())
        return float((self.sizes[:rank] ** 2).sum()) / total if total else 1.0


@dataclass(frozen=True)
class Prepared:
    """One attention's conversion but for the rank: query [H, nope + d_r, D] and its bias, rotary key [d_r, D] and its
    bias, the rest factored."""

    shape: Shape
    q: np.ndarray
    q_bias: np.ndarray
    z: np.ndarray
    z_bias: np.ndarray
    v_bias: np.ndarray
    mean: np.ndarray
    factors: _Factors
    rotary_share: float

    def at(self, rank: int) -> MLAWeights:
        """Of this rank."""
        shape, f, G = self.shape, self.factors, self.shape.config.num_key_value_heads
        up, down = f.left[:, :rank], f.left[:, :rank].T @ f.stacked
        value = f.stacked[f.keys:]
        lost = value @ self.mean - up[f.keys:] @ (down @ self.mean)
        up_k = np.zeros((G, shape.nope, rank)) if shape.whole else (up[:f.keys] / f.balance).reshape(G, -1, rank)
        group = np.arange(len(self.q)) // (len(self.q) // G)  # of each query head
        kv_b = np.concatenate([up_k, up[f.keys:].reshape(G, -1, rank)], axis=1)[group]  # [H, nope + v, d_c]
        kv_b_bias = np.concatenate([np.zeros((G, shape.nope)), self.v_bias + lost.reshape(G, -1)], axis=1)[group]
        return MLAWeights(
            q=self.q.reshape(-1, self.q.shape[2]), q_bias=self.q_bias.reshape(-1), kv_a=np.concatenate([down, self.z]),
            kv_a_bias=np.concatenate([np.zeros(rank), self.z_bias]), kv_b=kv_b.reshape(-1, rank),
            kv_b_bias=kv_b_bias.reshape(-1), rotary_share=self.rotary_share, latent_share=f.share(rank))


def convert(w: HeadWeights, m: Moments, shape: Shape) -> MLAWeights:
    """One attention as MLA of the given shape."""
    return prepare(w, m, shape).at(shape.rank)


def prepare(w: HeadWeights, m: Moments, shape: Shape) -> Prepared:
    """One attention, split and factored once for every rank; `shape`'s own does not matter."""
    c, G = shape.config, shape.config.num_key_value_heads
    k, k_bias = _pairs(w.k)
    q, q_bias = _pairs(w.q)
    group = np.arange(len(q)) // (len(q) // G)  # of each query head
    rotary_share = 1.0
    if shape.whole:
        z, z_bias, rest = k.reshape(G * k.shape[1], -1), k_bias.reshape(-1), k[:, :0]
        own = np.equal.outer(group, np.arange(G))[:, :, None]  # [H, G, 1]
        q_rope, q_rope_bias = own[..., None] * q[:, None], own * q_bias[:, None]  # [H, G, n, D]
    else:
        axes = principal_axes(w, m, c)
        kept = np.arange(G) < shape.kept[:, None]  # [n, G]
        rotary_share = float((axes.energy * kept).sum() / max(axes.energy.sum(), np.finfo(float).tiny))
        pair, u = np.repeat(np.arange(len(kept)), shape.kept), axes.vectors.transpose(0, 2, 1)[kept]  # [r], [r, G]
        z, z_bias = np.einsum("rg,grd->rd", u.conj(), k[:, pair]), np.einsum("rg,gr->r", u.conj(), k_bias[:, pair])
        seen = u.conj().T[group]  # [H, r]
        q_rope, q_rope_bias = seen[..., None] * q[:, pair], seen * q_bias[:, pair]
        basis = axes.vectors * kept[:, None]
        rest = (k - np.einsum("igu,ihu,hid->gid", basis, basis.conj(), k, optimize=True))[:, shape.still]
    growth = ((shape.nope + shape.rotary) / c.head_dim) ** 0.5
    still, D = growth * c.rope_factor**2, c.hidden_size  # cos and sin carry the factor for the rotary columns alone
    q_nope = np.zeros((len(q), shape.nope, D)) if shape.whole else still * _columns(q[:, shape.still], 1)
    q_nope_bias = np.zeros((len(q), shape.nope)) if shape.whole else still * _columns(q_bias[:, shape.still], 1)
    return Prepared(
        shape, np.concatenate([q_nope, growth * _columns(q_rope.reshape(len(q), -1, D), 1)], axis=1),
        np.concatenate([q_nope_bias, growth * _columns(q_rope_bias.reshape(len(q), -1), 1)], axis=1),
        _columns(z, 0), _columns(z_bias, 0), w.v.bias, m.mean, _Factors.of(rest, w.v, m), rotary_share)


def attend(w: MLAWeights, o: np.ndarray, o_bias: np.ndarray, shape: Shape, x: np.ndarray) -> np.ndarray:
    """The converted attention over one sequence [T, D] -> [T, D], K and V expanded; perplexity is measured by it."""
    c, H = shape.config, shape.config.num_attention_heads
    latent, k_rope = np.split(x @ w.kv_a.T + w.kv_a_bias, [shape.rank], axis=1)
    q_nope, q_rope = np.split((x @ w.q.T + w.q_bias).reshape(len(x), H, -1), [shape.nope], axis=2)
    k_nope, v = np.split((latent @ w.kv_b.T + w.kv_b_bias).reshape(len(x), H, -1), [shape.nope], axis=2)
    q_rope = rotate(q_rope, shape.inv_freq, c.rope_factor)
    k_rope = np.broadcast_to(rotate(k_rope[:, None], shape.inv_freq, c.rope_factor), q_rope.shape)
    mixed = causal_attention(np.concatenate([q_nope, q_rope], axis=2), np.concatenate([k_nope, k_rope], axis=2), v,
                             (shape.nope + shape.rotary) ** -0.5)
    out: np.ndarray = mixed.reshape(len(x), -1) @ o.T + o_bias
    return out
