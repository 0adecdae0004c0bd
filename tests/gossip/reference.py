"""An independent reference: every algorithm in matrix form over all nodes at once, dense and slow, float64.

Written from the equations alone. It shares no code with the product: no messages, no peers, no in-place steps.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np


def reference_trajectory(s: dict) -> dict:
    """Return {"x", "z", "u"} of a scenario, arrays of rounds + 1 entries."""
    return _events(s) if "events" in s else _rounds(s)


def _rounds(s):
    name, n, d, rounds = s["algorithm"], s["nodes"], s["dim"], s["rounds"]
    eye = np.eye(n)
    x = np.tile(np.array(s["x0"], float), (n, 1))
    u = np.ones(n)
    zeros = np.zeros((n, d))
    memory = zeros.copy()
    replicas = x.copy() if name in ("dcd-psgd", "ecd-psgd") else zeros.copy()
    x_before, step_before = x.copy(), zeros.copy()
    velocity, factors = zeros.copy(), {}
    push_sum = name in ("sgp", "sparse-push", "scsp", "quant-sgp")
    xs, zs, us = [x.copy()], [x.copy()], [u.copy()]
    for t in range(rounds):
        w = np.array(s["mixing"][(t // s.get("mixing_period", 1)) % len(s["mixing"])]) if "mixing" in s else eye
        eta = s.get("averaging_rate", 1.0)
        slack = eta * w + (1 - eta) * eye
        lr = s["lr"][t] if isinstance(s["lr"], list) else s["lr"]
        z = x / u[:, None]
        final = name == "scsp" and t >= rounds - s["final_rounds"]
        gradient, velocity_before = _gradient(s, z), velocity
        g, velocity = _direction(s, gradient, z, velocity)
        if final:
            lr, eta = 0.0, s.get("final_averaging_rate", 1.0)

        def c(v, t=t):
            return np.stack([_compress(s, v[i], t, i) for i in range(n)])

        step = lr * g
        new_u = u
        if name == "local":
            x = x - step
        elif name == "allreduce":
            x = x - lr * g.mean(axis=0)
        elif name == "low-rank":
            update, memory, factors = _low_rank_sum(s, gradient + memory, factors, t)
            g, velocity = _direction(s, np.tile(update, (n, 1)), z, velocity_before)
            x = x - lr * g
        elif name == "compressed-allreduce":
            update, memory = _compressed_sums(s, gradient + memory, t)
            g, velocity = _direction(s, np.tile(update, (n, 1)), z, velocity_before)
            x = x - lr * g
        elif name == "parameter-server":
            x = x - lr * c(g).mean(axis=0)
        elif name == "d-psgd":
            x = x + eta * (w - eye) @ x - step
        elif name == "naive-quantized":
            diagonal = np.diag(np.diag(w))
            x = diagonal @ x + (w - diagonal) @ c(x) - step
        elif name == "sgp" or final:
            half = x - step if not final else x
            x = half + eta * (w - eye) @ half
        elif name in ("deep-squeeze", "sparse-push", "scsp"):
            half = x - step
            v = half + memory
            sent = c(v)
            memory = v - sent
            x = half + eta * (w - eye) @ sent
        elif name in ("choco-sgd", "quant-sgp"):
            half = x - step
            replicas = replicas + c(half - replicas)
            x = half + eta * (w - eye) @ replicas
        elif name == "dcd-psgd":
            x = x + c(w @ replicas - step - x)
            replicas = x.copy()
        elif name == "ecd-psgd":
            k = t + 1
            following = w @ replicas - step
            replicas = (1 - 2 / k) * replicas + 2 / k * c((1 - k / 2) * x + k / 2 * following)
            x = following
        elif name in ("moniqua", "moniqua-d2", "d2"):
            h = x if name == "moniqua" else 2 * x - x_before - step + step_before
            x_before, step_before = x, step
            if name == "d2":
                x = slack @ h
            else:
                new = h.copy()
                for i in range(n):
                    own = _modulo(s, h[i], h[i], t, i)
                    for j in range(n):
                        if w[i, j]:
                            new[i] += slack[i, j] * (_modulo(s, h[j], h[i], t, j) - own)
                x = new - step if name == "moniqua" else new
        else:
            raise AssertionError(name)
        if push_sum:
            new_u = u + eta * (w - eye) @ u
        u = new_u
        velocity = _after_round(s, velocity, z, x / u[:, None], lr)
        xs.append(x.copy())
        zs.append(x / u[:, None])
        us.append(u.copy())
    return {"x": np.array(xs), "z": np.array(zs), "u": np.array(us)}


def _compressed_sums(s, m, t):
    """Return the mean update and the memories after a round, from M_i = g_i + E_i in the rows of `m`."""
    n, kept, update, ends = s["nodes"], m.copy(), np.zeros(m.shape[1]), np.cumsum([0, *s["layers"]])
    for owner in range(n):
        start, stop = (m.shape[1] * edge // n for edge in (owner, owner + 1))
        cuts = np.unique([start, *ends[(ends > start) & (ends < stop)], stop])
        pieces = {**s, "layers": np.diff(cuts).tolist()}
        sent = np.stack([_compress(pieces, row[start:stop], t, node) for node, row in enumerate(m)])
        sent[owner] = m[owner, start:stop]
        total = sent.sum(axis=0)
        told = _compress(pieces, total, t, owner)
        update[start:stop], kept[:, start:stop] = told / n, kept[:, start:stop] - sent
        kept[owner, start:stop] = total - told
    return update, kept


def _low_rank_sum(s, m, factors, t):
    """Return the mean update, the memories and the factors after a round, from M_i = g_i + E_i in the rows of `m`."""
    n, rank, bits, side = s["nodes"], s["rank"], s["factor_bits"], t % 2
    shapes = [layer if isinstance(layer, list) else [1, layer] for layer in s["layers"]]
    starts = np.cumsum([0, *map(np.prod, shapes)])
    vectors, bases, after = [], [], {}
    for number, (shape, start) in enumerate(zip(shapes, starts, strict=False)):
        rows, columns = shape[0], int(np.prod(shape[1:]))
        matrices = m[:, start : start + rows * columns].reshape(n, rows, columns)
        if rank * (rows + columns) >= rows * columns:
            vectors.append([matrices.reshape(n, -1)])
            bases.append(None)
            continue
        length = rows if side else columns
        drawn = np.array(s["uniforms"][t])[start : start + rank * length].reshape(rank, length) - 0.5
        basis, triangle = np.linalg.qr(factors.get(number, drawn).T)
        basis = basis * np.sign(np.diag(triangle))
        bases.append(basis)
        a = (matrices.transpose(0, 2, 1) if side else matrices) @ basis
        vectors.append([a[:, :, j] for j in range(rank)])
    flat = np.concatenate([v for layer in vectors for v in layer], axis=1)
    ends = np.cumsum([v.shape[1] for layer in vectors for v in layer])
    layer_ends = np.cumsum([sum(v.shape[1] for v in layer) for layer in vectors])
    by_layer, size = s.get("factor_exponents") == "layer", flat.shape[1]
    owned = [size * i // n for i in range(n + 1)]
    cuts = np.unique([0, *(layer_ends if by_layer else ends), *owned])
    told, mean = np.zeros_like(flat), np.zeros(size)
    for low, high in pairwise(cuts):
        owner = next(i for i in range(n) if owned[i] <= low < owned[i + 1])
        layer, least = np.searchsorted(layer_ends, high), np.zeros(n)
        if by_layer:
            whole = slice(layer_ends[layer - 1] if layer else 0, layer_ends[layer])
            least = [_power(row[whole], bits) for row in flat]
        said = np.stack([_rounded(row[low:high], bits, each) for row, each in zip(flat, least, strict=True)])
        total = _rounded(said.sum(axis=0), bits, least[owner])
        said[owner] -= said.sum(axis=0) - total
        told[:, low:high], mean[low:high] = said, total / n
    update, kept, at = np.zeros(m.shape[1]), m.copy(), 0
    for number, (shape, start, basis) in enumerate(zip(shapes, starts, bases, strict=False)):
        rows, columns = shape[0], int(np.prod(shape[1:]))
        part = slice(start, start + rows * columns)
        width = rows * columns if basis is None else rank * (columns if side else rows)
        of_mean, of_each, at = mean[at : at + width], told[:, at : at + width], at + width
        if basis is None:
            update[part], kept[:, part] = of_mean, m[:, part] - of_each
            continue

        def product(a, basis=basis):
            matrix = a.reshape(rank, -1).T @ basis.T
            return (matrix.T if side else matrix).reshape(-1)

        after[number] = of_mean.reshape(rank, -1)
        update[part] = product(of_mean)
        kept[:, part] = m[:, part] - np.stack([product(a) for a in of_each])
    return update, kept, after


def _rounded(v, bits, least):
    """Round to multiples of `_power`, or of `least` if that is larger."""
    power = max(_power(v, bits), least)
    return np.rint(v / power) * power


def _power(v, bits):
    """Return the smallest power of two of which 2^(bits−1) − 1 reach the largest number."""
    largest, power = np.abs(v).max(), 2.0**-128
    while largest > (2 ** (bits - 1) - 1) * power:
        power *= 2
    return power


def _events(s):
    x = np.tile(np.array(s["x0"], float), (s["nodes"], 1))
    read = x.copy()
    xs = [x.copy()]
    for e, event in enumerate(s["events"]):
        lr = s["lr"][e] if isinstance(s["lr"], list) else s["lr"]
        i = event[1]
        x = x.copy()
        if event[0] == "read":
            read[i] = x[i]
        elif event[0] == "step":
            x[i] = x[i] - lr * _gradient(s, read)[i]
        else:
            j = event[2]
            if s["algorithm"] == "ad-psgd":
                x[i] = x[j] = (x[i] + x[j]) / 2
            else:
                at_i = _modulo(s, x[j], x[i], e, j) - _modulo(s, x[i], x[i], e, i)
                at_j = _modulo(s, x[i], x[j], e, i) - _modulo(s, x[j], x[j], e, j)
                x[i], x[j] = x[i] + at_i / 2, x[j] + at_j / 2
        xs.append(x)
    return {"x": np.array(xs)}


def _gradient(s, z):
    return np.array(s["objective"]["curvature"]) * (z - np.array(s["objective"]["target"]))


def _direction(s, g, z, velocity):
    m = s.get("momentum", {"kind": "none"})
    beta = m.get("beta", 0.9)
    g = g + m.get("weight_decay", 0.0) * z
    kind = m["kind"]
    if kind == "heavy-ball":
        velocity = beta * velocity + g
        return velocity, velocity
    if kind == "nesterov":
        velocity = beta * velocity + g
        return g + beta * velocity, velocity
    if kind == "qg":
        return beta * velocity + g, velocity
    if kind == "qg-nesterov":
        return g + beta * (beta * velocity + g), velocity
    return g, velocity


def _after_round(s, velocity, before, after, lr):
    m = s.get("momentum", {"kind": "none"})
    if not m["kind"].startswith("qg") or lr == 0:
        return velocity
    mu = m.get("mu", m.get("beta", 0.9))
    return mu * velocity + (1 - mu) * (before - after) / lr


def _uniforms(s, t, node):
    if "uniforms" not in s:
        return None
    row = np.array(s["uniforms"][t])
    return row[node] if row.ndim == 2 else row


def _compress(s, v, t, node):
    c = s.get("compressor", {"kind": "none"})
    omega = _uniforms(s, t, node)
    result, start = np.zeros_like(v), 0
    for size in s["layers"]:
        part = slice(start, start + size)
        start += size
        layer = v[part]
        if size < s.get("whole_below", 0):
            result[part] = layer
            continue
        draws = None if omega is None else omega[part]
        result[part] = _COMPRESSORS[c["kind"]](layer, c, draws)
    return result


def _top_k(v, c, _):
    k = max(1, round(c["fraction"] * len(v)))
    chosen = sorted(range(len(v)), key=lambda i: (-abs(v[i]), i))[:k]
    result = np.zeros_like(v)
    result[chosen] = v[chosen]
    return result


def _qsgd(v, c, draws):
    s = 2 ** c["bits"] - 1
    norm = np.sqrt(np.sum(v * v))
    if norm == 0:
        return np.zeros_like(v)
    exact = s * np.abs(v) / norm
    level = np.minimum(np.floor(exact) + (draws < exact - np.floor(exact)), s)
    result = np.sign(v) * norm * level / s
    if c.get("biased"):
        result = result / (1 + min(len(v) / s**2, np.sqrt(len(v)) / s))
    return result


def _grid(v, c, draws):
    exact = v / c["step"]
    if draws is None:
        return np.floor(exact + 0.5) * c["step"]
    return (np.floor(exact) + (draws <= exact - np.floor(exact))) * c["step"]


def _sign(v, _, __):
    return np.where(v >= 0, 1.0, -1.0) * np.mean(np.abs(v))


_COMPRESSORS = {"none": lambda v, *_: v, "top_k": _top_k, "qsgd": _qsgd, "grid": _grid, "sign": _sign}


def _modulo(s, x, y, t, node):
    """Return what somebody who holds y makes of the code of x: ((q B − y) mod B) + y."""
    c = s["compressor"]
    theta = c["theta"][t] if isinstance(c["theta"], list) else c["theta"]
    levels = 2 ** c["bits"]
    delta = (1.0 if c["rounding"] == "stochastic" else 0.5) / levels
    b = 2 * theta / (1 - 2 * delta)
    omega = _uniforms(s, t, node)
    if c["rounding"] == "nearest":
        k, offset = np.floor(levels * x / b), 0.5
    elif c["rounding"] == "stochastic":
        k, offset = np.floor(levels * x / b + omega), 0.0
    else:
        k, offset = np.floor(levels * x / b + omega), 0.5 - omega
    q = (np.mod(k, levels) + offset) / levels
    difference = q * b - y
    return difference - b * np.floor(difference / b + 0.5) + y
