"""Neighbourhood attention as one fused kernel for NVIDIA GPUs, and its gradients.

One program computes a box of BLOCK_M queries of one head against the box of all keys that these see. No list of tokens
is read: positions follow from the rule. Of a box of keys, one axis is walked and the two others are a plane, cut into
chunks of C keys; a step takes a chunk at BLOCK_N / C places of the walked axis. What the plane hides stays in registers
for all steps of a chunk, and what the walked axis hides is a number a query and place: both are what the scores of a
step begin with. The gradients of keys and values walk the box of queries that see a box of keys, which is as closed.

Axes are walked, outer and inner, z, y and x here, whichever of the tokens' axes they are; axes that a grid lacks have
one token. An axis with dilation is several axes, one of each residue.
"""

import triton
import triton.language as tl

from tilewright.devices.cuda.bounded_softmax import update_below
from tilewright.devices.cuda.online_softmax import load_rows, update, write_rows

# What hidden pairs lose, above any score, and what the running maximum begins with: below all that is allowed.
# ASSUME: products |q . k| stay below half of that.
HIDDEN = tl.constexpr(-(2.0**100))
FLOOR = tl.constexpr(-(2.0**99))
# Sums of weights that are powers of the scores as they are: between these, float32 has room for all that counts.
LEAST = tl.constexpr(2.0**-80)
MOST = tl.constexpr(2.0**100)
# Boxes of the outer and inner axis that follow one another before the next ones of these axes, for the L2 cache.
NEAR = tl.constexpr(8)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def keys_of(i, n, window, stride, STRIDED: tl.constexpr, CAUSAL: tl.constexpr, CUT: tl.constexpr):
    """``(first, end)`` of the keys of queries `i` of an axis of `n` tokens. STRIDED: windows have strides above 1."""
    group = i
    if STRIDED:
        group = i // stride * stride
    if CAUSAL:
        first = tl.maximum(tl.minimum(group + stride, n) - window, 0)
        end = tl.minimum(i + 1, n)
    else:
        leader = tl.minimum(group + stride // 2, n - 1)
        first = tl.maximum(leader - window // 2, 0)
        if CUT:
            end = tl.minimum(leader - window // 2 + window, n)
        else:
            first = tl.minimum(first, n - window)
            end = first + window
    return first, end


@triton.jit
def queries_of(j, n, window, stride, STRIDED: tl.constexpr, CAUSAL: tl.constexpr, CUT: tl.constexpr):
    """``(first, end)`` of the queries that see keys `j` of an axis of `n` tokens: the inverse of `keys_of`."""
    if not STRIDED:
        stride = 1
    if CAUSAL:
        first = j
        # The last group whose leader is at most j + window - 1.
        end = tl.where(j + window >= n, n, tl.minimum((j + window) // stride * stride, n))
    else:
        left = window // 2
        # Leaders from `low` to `high` see the key.
        low, high = j - window + 1 + left, j + left
        first = tl.maximum(low - stride // 2 + stride - 1, 0) // stride * stride
        end = tl.minimum(tl.maximum(high - stride // 2 + stride, 0) // stride * stride, n)
        if CUT:
            first = tl.where(low > n - 1, n, first)
            end = tl.where(high >= n - 1, n, end)
        else:
            first = tl.where(j < window, 0, first)
            end = tl.where(j >= n - window, n, end)
    return first, end


@triton.jit
def hidden_in_plane(y, x, there, plane, BITS: tl.constexpr):
    """[BLOCK_M, BLOCK_N]: HIDDEN where a cell of the plane is outside of a query's window, else 0.

    y, x, there: [BLOCK_N], see `cells_at`. BITS: a bit for each row and column of the plane, and one more, fit a word.
    plane: of `frame_of`.
    """
    if BITS:
        # Two instructions a pair: one bit of a row, of a column, or for what is not there, is hidden.
        extent_y = plane[11]
        word = tl.where(there, (1 << y) | ((1 << extent_y) << x), -(2**31))
        free = (1 << plane[8]) - (1 << plane[7])
        free |= ((1 << plane[10]) - (1 << plane[9])) << extent_y
        return tl.where((word[None, :] & ~free[:, None]) == 0, 0.0, HIDDEN)
    seen = (y[None, :] >= plane[7][:, None]) & (y[None, :] < plane[8][:, None])
    seen = seen & (x[None, :] >= plane[9][:, None]) & (x[None, :] < plane[10][:, None])
    return tl.where(seen & there[None, :], 0.0, HIDDEN)


@triton.jit
def hidden_at(first_z, n, b_plane, z_first, z_end, C: tl.constexpr, BLOCK_N: tl.constexpr):
    """`b_plane` and what the walked axis hides, at BLOCK_N / C of its places from `first_z` on."""
    PLACES: tl.constexpr = BLOCK_N // C
    if PLACES == 1:
        b_z = tl.where((first_z >= z_first) & (first_z < z_end), 0.0, HIDDEN)[:, None]
    elif PLACES == 2:
        # Which place a column is of is known when this is compiled: no comparison is left.
        b_z0 = tl.where((first_z >= z_first) & (first_z < z_end), 0.0, HIDDEN)
        b_z1 = tl.where((first_z + 1 >= z_first) & (first_z + 1 < z_end), 0.0, HIDDEN)
        b_z = tl.where((n < C)[None, :], b_z0[:, None], b_z1[:, None])
    elif PLACES == 4:
        b_z0 = tl.where((first_z >= z_first) & (first_z < z_end), 0.0, HIDDEN)
        b_z1 = tl.where((first_z + 1 >= z_first) & (first_z + 1 < z_end), 0.0, HIDDEN)
        b_z2 = tl.where((first_z + 2 >= z_first) & (first_z + 2 < z_end), 0.0, HIDDEN)
        b_z3 = tl.where((first_z + 3 >= z_first) & (first_z + 3 < z_end), 0.0, HIDDEN)
        b_z01 = tl.where((n < C)[None, :], b_z0[:, None], b_z1[:, None])
        b_z23 = tl.where((n < 3 * C)[None, :], b_z2[:, None], b_z3[:, None])
        b_z = tl.where((n < 2 * C)[None, :], b_z01, b_z23)
    else:
        z = first_z + n // C
        b_z = tl.where((z[None, :] >= z_first[:, None]) & (z[None, :] < z_end[:, None]), 0.0, HIDDEN)
    return b_plane + b_z


@triton.jit
def cells_at(at, plane):
    """``(y, x, which are there)`` of the cells `at` of a plane; of the last one for those beyond."""
    cells = plane[11] * plane[12]
    there = at < cells
    at = tl.minimum(at, cells - 1)
    # A division, exact for planes whose cells times width are below 2**32.
    y = tl.umulhi(at.to(tl.uint32), plane[13]).to(tl.int32)
    y = tl.where(plane[12] == 1, at, y)
    return y, at - y * plane[12], there


@triton.jit
def step_at(first_z, n, extent_z, offsets, strides, C: tl.constexpr, BLOCK_N: tl.constexpr):
    """``(offset of a step, offsets [BLOCK_N] beside it)`` at BLOCK_N / C places of the walked axis, `first_z` first."""
    if C == BLOCK_N:
        return tl.cast(first_z, tl.int64) * strides[0], offsets
    # Places beyond the last are read as that one, and hidden.
    return tl.cast(0, tl.int64), offsets + tl.minimum(first_z + n // C, extent_z - 1) * strides[0]


@triton.jit
def box_of(runs, columns, near_y, near_x):
    """``(z, y, x)`` of a program's box. Boxes run along 2**near_y by 2**near_x of a plane, then along z, then along the
    `columns` of such planes, so that neighbours in time share keys in the L2 cache."""
    box = tl.program_id(0)
    x = box & ((1 << near_x) - 1)
    box = box >> near_x
    y = box & ((1 << near_y) - 1)
    box = box >> near_y
    plane = box // runs
    z = box - plane * runs
    band = plane // columns
    return z, (band << near_y) + y, ((plane - band * columns) << near_x) + x


@triton.jit
def residue_of(place, length, dilation, DILATED: tl.constexpr):
    """``(residue, tokens of its axis, what is left of `place`)``."""
    if not DILATED:
        return 0, length, place
    rest = place % dilation
    return rest, (length - rest + dilation - 1) // dilation, place // dilation


@triton.jit
def along(
    box, m, n, window, every, T: tl.constexpr, STRIDED: tl.constexpr, CAUSAL: tl.constexpr, CUT: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """One axis of a box whose rows are the tokens `box` + `m` of it: ``(rows, at most the last token, which are there,
    first token of all that they see, how many these are, first and end of what each sees, last first, least end)``, all
    but the rows from that first one on.

    TURNED: rows are keys, and see the queries that see them.
    """
    there = box + m < n
    m = tl.minimum(m, n - 1 - box)
    # Neither end decreases along the axis.
    last = tl.minimum(box + T, n) - 1
    if TURNED:
        first, end = queries_of(box + m, n, window, every, STRIDED, CAUSAL, CUT)
        start, least = queries_of(box, n, window, every, STRIDED, CAUSAL, CUT)
        highest, stop = queries_of(last, n, window, every, STRIDED, CAUSAL, CUT)
    else:
        first, end = keys_of(box + m, n, window, every, STRIDED, CAUSAL, CUT)
        start, least = keys_of(box, n, window, every, STRIDED, CAUSAL, CUT)
        highest, stop = keys_of(last, n, window, every, STRIDED, CAUSAL, CUT)
    return m, there, start, tl.maximum(stop - start, 0), first - start, end - start, highest - start, least - start


@triton.jit
def frame_of(
    near_y, near_x, columns, runs, run, length_z, length_y, length_x, window_y, window_x, every_y, every_x,
    dilation_z, dilation_y, dilation_x, m,
    TZ: tl.constexpr, TY: tl.constexpr, TX: tl.constexpr, DILATED: tl.constexpr, STRIDED: tl.constexpr,
    CAUSAL_Y: tl.constexpr, CAUSAL_X: tl.constexpr, CUT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Where a program is, which computes boxes that follow one another along z: ``(head, image, boxes, axis, plane)``.

    axis: of z, the residue, the tokens of its axis, the first one of the first box. plane: of y and x, each the first
    token of a box, its rows beside that, the first token that they see; which rows are there; first and end of each
    row's window along y and x beside the first token seen, extents of all along these, what divides by its width.
    """
    box_z, box_y, box_x = box_of(runs, columns, near_y, near_x)
    box_z, box_y, box_x = box_z * run * TZ, box_y * TY, box_x * TX
    rest_z, n_z, place = residue_of(tl.program_id(1), length_z, dilation_z, DILATED)
    rest_y, n_y, place = residue_of(place, length_y, dilation_y, DILATED)
    rest_x, n_x, head = residue_of(place, length_x, dilation_x, DILATED)
    boxes = tl.where((box_y < n_y) & (box_x < n_x), tl.minimum(run, (n_z - box_z + TZ - 1) // TZ), 0)
    m_y, in_y, start_y, extent_y, y_first, y_end, _, _ = along(
        box_y, m // TX % TY, n_y, window_y, every_y, TY, STRIDED, CAUSAL_Y, CUT, TURNED
    )
    m_x, in_x, start_x, extent_x, x_first, x_end, _, _ = along(
        box_x, m % TX, n_x, window_x, every_x, TX, STRIDED, CAUSAL_X, CUT, TURNED
    )
    divide = (tl.cast(0xFFFFFFFF, tl.uint32) // tl.maximum(extent_x, 1).to(tl.uint32) + 1).to(tl.uint32)
    box_y, start_y = rest_y + box_y * dilation_y, rest_y + start_y * dilation_y
    box_x, start_x = rest_x + box_x * dilation_x, rest_x + start_x * dilation_x
    plane = (
        box_y.to(tl.int64), box_x.to(tl.int64), m_y * dilation_y, m_x * dilation_x, start_y.to(tl.int64),
        start_x.to(tl.int64), in_y & in_x, y_first, y_end, x_first, x_end, extent_y, extent_x, divide,
    )  # fmt: skip
    return head, tl.program_id(2).to(tl.int64), boxes, (rest_z, n_z, box_z), plane


@triton.jit
def walk_of(
    axis, number, m, window, every, dilation,
    TZ: tl.constexpr, PLANE: tl.constexpr, STRIDED: tl.constexpr, CAUSAL: tl.constexpr, CUT: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """Of z, for one box of a program: ``(first token, rows beside it, which are there, first token that they see,
    windows)``; windows: first and end of each row's beside that, extent, between which places all rows see all."""
    box = axis[2] + number * TZ
    m_z, in_z, start, extent, first, end, highest, least = along(
        box, m // PLANE, axis[1], window, every, TZ, STRIDED, CAUSAL, CUT, TURNED
    )
    box, start = axis[0] + box * dilation, axis[0] + start * dilation
    windows = first, end, extent, highest, least
    return tl.cast(box, tl.int64), m_z * dilation, in_z, tl.cast(start, tl.int64), windows


@triton.jit
def part_of(cells, PART: tl.constexpr, BLOCK_N: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr):
    """``(first cell, chunks)`` of a part of a plane: whole chunks of BLOCK_N, or of the rest one of C1 and one of C2.

    A plane whose rest these do not hold, as at a border, has one more whole chunk.
    """
    whole, rest = cells // BLOCK_N, cells % BLOCK_N
    more = rest > C1 + C2
    whole += more.to(tl.int32)
    rest = tl.where(more, 0, rest)
    if PART == 0:
        return whole * 0, whole
    if PART == 1:
        return whole * BLOCK_N, (rest > 0).to(tl.int32)
    return whole * BLOCK_N + C1, (rest > C1).to(tl.int32)


@triton.jit
def offset(z, y, x, strides):
    """Where tokens are. strides: of z, y and x."""
    return z * strides[0] + y * strides[1] + x * strides[2]


@triton.jit
def widened(z, y, x, WIDE: tl.constexpr):
    """Strides of z, y and x; WIDE: for offsets of 2**31 values or more."""
    if WIDE:
        return tl.cast(z, tl.int64), tl.cast(y, tl.int64), tl.cast(x, tl.int64)
    return z, y, x


@triton.jit
def walked(strides, dilation_z, dilation_y, dilation_x):
    """Strides from one token of a residue to the next."""
    return strides[0] * dilation_z, strides[1] * dilation_y, strides[2] * dilation_x


@triton.jit
def chunk_at(first, n, tokens, plane, C: tl.constexpr, BITS: tl.constexpr):
    """``(offsets of keys and of values, what the plane hides)`` of the C cells from `first` on."""
    y, x, there = cells_at(first + n % C, plane)
    keys, values = y * tokens[2][1] + x * tokens[2][2], y * tokens[3][1] + x * tokens[3][2]
    return keys, values, hidden_in_plane(y, x, there, plane, BITS)


@triton.jit
def attend_chunk(
    chunk, n, queries, tokens, windows, state, scale_log2,
    C: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, FLAT: tl.constexpr, BOUNDED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The `state` of the softmax, m_i, l_i, acc0 and acc1, after all places of a chunk, see `chunk_at`.

    queries: blocks of D0 and D1 channels. tokens: keys, values, strides of both. windows: of `walk_of`.
    """
    PLACES: tl.constexpr = BLOCK_N // C
    steps = (windows[2] + PLACES - 1) // PLACES
    begin = steps
    end = steps
    if FLAT:
        # One cell: between the places where the last query begins to see and the first one ends, all see all.
        begin = tl.minimum((windows[3] + PLACES - 1) // PLACES, steps)
        end = tl.maximum(tl.minimum(windows[4] // PLACES, steps), begin)
    for j in tl.range(0, begin, num_stages=NUM_STAGES):
        b_hidden = hidden_at(j * PLACES, n, chunk[2], windows[0], windows[1], C, BLOCK_N)
        state = attend_step(
            j * PLACES, n, chunk, b_hidden, queries, tokens, windows[2], state, scale_log2,
            C, BLOCK_N, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, BOUNDED,
        )  # fmt: skip
    if FLAT:
        for j in tl.range(begin, end, num_stages=NUM_STAGES):
            state = attend_step(
                j * PLACES, n, chunk, chunk[2], queries, tokens, windows[2], state, scale_log2,
                C, BLOCK_N, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, BOUNDED,
            )  # fmt: skip
        for j in tl.range(end, steps, num_stages=NUM_STAGES):
            b_hidden = hidden_at(j * PLACES, n, chunk[2], windows[0], windows[1], C, BLOCK_N)
            state = attend_step(
                j * PLACES, n, chunk, b_hidden, queries, tokens, windows[2], state, scale_log2,
                C, BLOCK_N, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, BOUNDED,
            )  # fmt: skip
    return state


@triton.jit
def attend_part(
    part, n, queries, tokens, windows, plane, state, scale_log2,
    C: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, BOUNDED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The `state` after the chunks of a part of the plane, see `part_of` and `attend_chunk`."""
    for i in range(part[1]):
        chunk = chunk_at(part[0] + i * C, n, tokens, plane, C, BITS)
        state = attend_chunk(
            chunk, n, queries, tokens, windows, state, scale_log2,
            C, BLOCK_N, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, False, BOUNDED, NUM_STAGES,
        )  # fmt: skip
    return state


@triton.jit
def attend_step(
    first_z, n, chunk, b_hidden, queries, tokens, extent_z, state, scale_log2,
    C: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """The `state` after one step, whose scores begin with `b_hidden`."""
    at, rows = step_at(first_z, n, extent_z, chunk[0], tokens[2], C, BLOCK_N)
    b_k0, b_k1 = load_rows(tokens[0] + at, rows, 1, HEAD_DIM, D0, D1)
    b_s = scores_from(b_hidden, queries, b_k0, b_k1, D1)
    at, rows = step_at(first_z, n, extent_z, chunk[1], tokens[3], C, BLOCK_N)
    b_v0, b_v1 = load_rows(tokens[1] + at, rows, 1, VALUE_DIM, V0, V1)
    if BOUNDED:
        return update_below(b_s, b_v0, b_v1, state[0], state[1], state[2], state[3], scale_log2, V1)
    return update(b_s, b_v0, b_v1, state[0], state[1], state[2], state[3], scale_log2, V1)


@triton.jit
def scores_from(b_s, rows, b_x0, b_x1, D1: tl.constexpr):
    """`b_s` and the products of blocks `rows`, a pair, with columns of blocks, each [., D0] and [., D1]."""
    b_s = tl.dot(rows[0], tl.trans(b_x0), b_s, input_precision="ieee")
    if D1:
        b_s = tl.dot(rows[1], tl.trans(b_x1), b_s, input_precision="ieee")
    return b_s


# Grids differ from call to call: nothing is compiled for one.
NOT_SPECIALIZED = [
    *(f"{name}_{axis}" for name in ("length", "window", "every", "dilation") for axis in "zyx"),
    "near_y", "near_x", "columns", "runs", "run", "n_extra",
]  # fmt: skip


@triton.jit
def weigh_box(
    m_i, chunk, n, queries, tokens, windows, plane, more, n_extra, scale_log2,
    BLOCK_N: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, BITS: tl.constexpr, HEAD_DIM: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    SINGLE: tl.constexpr, BOUNDED: tl.constexpr, FLAT: tl.constexpr, EXTRA: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The state of the softmax of a box after all its keys, see `attend_chunk`. m_i: what it begins with. All else as
    of `attend_box`."""
    acc0 = tl.zeros((m_i.shape[0], V0), tl.float32)
    acc1 = tl.zeros((m_i.shape[0], V1 if V1 else 1), tl.float32)
    state = m_i, tl.zeros((m_i.shape[0],), tl.float32), acc0, acc1
    if SINGLE:
        state = attend_chunk(
            chunk, n, queries, tokens, windows, state, scale_log2,
            C1, BLOCK_N, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, FLAT, BOUNDED, NUM_STAGES,
        )  # fmt: skip
    else:
        cells = plane[11] * plane[12]
        state = attend_part(
            part_of(cells, 0, BLOCK_N, C1, C2), n, queries, tokens, windows, plane, state, scale_log2,
            BLOCK_N, BLOCK_N, BITS, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, BOUNDED, NUM_STAGES,
        )  # fmt: skip
        if C1:
            state = attend_part(
                part_of(cells, 1, BLOCK_N, C1, C2), n, queries, tokens, windows, plane, state, scale_log2,
                C1, BLOCK_N, BITS, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, BOUNDED, NUM_STAGES,
            )  # fmt: skip
        if C2:
            state = attend_part(
                part_of(cells, 2, BLOCK_N, C1, C2), n, queries, tokens, windows, plane, state, scale_log2,
                C2, BLOCK_N, BITS, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, BOUNDED, NUM_STAGES,
            )  # fmt: skip
    if EXTRA:
        for j in tl.range(0, n_extra, BLOCK_N):
            at = tl.minimum(j + n, n_extra - 1)
            b_s = tl.zeros((m_i.shape[0], BLOCK_N), tl.float32) + tl.where(j + n < n_extra, 0.0, HIDDEN)[None, :]
            b_k0, b_k1 = load_rows(more[0], at, more[2], HEAD_DIM, D0, D1)
            b_s = scores_from(b_s, queries, b_k0, b_k1, D1)
            b_v0, b_v1 = load_rows(more[1], at, more[3], VALUE_DIM, V0, V1)
            if BOUNDED:
                state = update_below(b_s, b_v0, b_v1, state[0], state[1], state[2], state[3], scale_log2, V1)
            else:
                state = update(b_s, b_v0, b_v1, state[0], state[1], state[2], state[3], scale_log2, V1)
    return state


@triton.jit
def far(least, most):
    """Whether sums of weights are beyond what float32 has room for."""
    return (tl.min(least, 0) < LEAST) | (tl.max(most, 0) > MOST)


@triton.jit
def attend_box(
    number, at, strides, walk, chunk, m, n, plane, more, n_extra, scale_log2, bound_log2,
    SIGN: tl.constexpr, TZ: tl.constexpr, TY: tl.constexpr, TX: tl.constexpr, BLOCK_N: tl.constexpr, C1: tl.constexpr,
    C2: tl.constexpr, STRIDED: tl.constexpr, BITS: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, CAUSAL_Z: tl.constexpr,
    CUT: tl.constexpr, SINGLE: tl.constexpr, BOUNDED: tl.constexpr, AGAIN: tl.constexpr, FLAT: tl.constexpr,
    EXTRA: tl.constexpr, LSE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Write the results of a box of a program, and return the sums of its weights.

    at, strides: of queries, keys, values, results and sums. walk: the walked axis and its rule. chunk: the plane where
    it is a SINGLE one. more: addresses of keys and values that all queries see, and what these are apart. BOUNDED: no
    maximum is looked for, and weights are powers of what scores are above `bound_log2`. AGAIN: a box whose sums are
    `far` is computed once more, with a maximum.
    """
    BLOCK_M: tl.constexpr = TZ * TY * TX
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr = at
    q_strides, k_strides, v_strides, o_strides, l_strides, steps = strides
    box_z, rows_z, in_z, start_z, windows = walk_of(
        walk[0], number, m, walk[1], walk[2], walk[3], TZ, TY * TX, STRIDED, CAUSAL_Z, CUT, False
    )
    m_rows = in_z & plane[6]
    tokens = k_ptr + start_z * k_strides[0], v_ptr + start_z * v_strides[0], steps[0], steps[1]
    rows = offset(rows_z, plane[2], plane[3], q_strides)
    b_q0, b_q1 = load_rows(q_ptr + box_z * q_strides[0], rows, 1, HEAD_DIM, D0, D1)
    if SIGN != 1:
        b_q0, b_q1 = b_q0 * SIGN, b_q1 * SIGN
    queries = b_q0, b_q1
    ones = tl.full((BLOCK_M,), 1.0, tl.float32)
    m_i, l_i, acc0, acc1 = weigh_box(
        ones * (bound_log2 if BOUNDED else FLOOR * scale_log2),
        chunk, n, queries, tokens, windows, plane, more, n_extra, scale_log2,
        BLOCK_N, C1, C2, BITS, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, SINGLE, BOUNDED, FLAT, EXTRA, NUM_STAGES,
    )  # fmt: skip
    # Nested, since the first one is known when this is compiled.
    if AGAIN:  # noqa: SIM102
        if far(l_i, l_i):
            m_i, l_i, acc0, acc1 = weigh_box(
                ones * (FLOOR * scale_log2), chunk, n, queries, tokens, windows, plane, more, n_extra, scale_log2,
                BLOCK_N, C1, C2, BITS, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, SINGLE, False, FLAT, EXTRA, NUM_STAGES,
            )  # fmt: skip
    rows = offset(rows_z, plane[2], plane[3], o_strides)
    # One division a row.
    share = 1.0 / l_i
    acc0, acc1 = acc0 * share[:, None], acc1 * share[:, None]
    write_rows(o_ptr + box_z * o_strides[0], rows, 1, acc0, acc1, m_rows, VALUE_DIM, V0, V1)
    if LSE:
        row = box_z * l_strides[0] + offset(rows_z, plane[2], plane[3], l_strides)
        tl.store(lse_ptr + row, (m_i + tl.log2(l_i)) * LN2, mask=m_rows)
    return l_i


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def tilewright_neighborhood(
    o_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, more_k_ptr, more_v_ptr,
    stride_ob, stride_oz, stride_oy, stride_ox, stride_oh, stride_qb, stride_qz, stride_qy, stride_qx, stride_qh,
    stride_kb, stride_kz, stride_ky, stride_kx, stride_kh, stride_vb, stride_vz, stride_vy, stride_vx, stride_vh,
    stride_lb, stride_lz, stride_ly, stride_lx,
    stride_mkb, stride_mkn, stride_mkh, stride_mvb, stride_mvn, stride_mvh,
    length_z, length_y, length_x, window_z, window_y, window_x, every_z, every_y, every_x,
    dilation_z, dilation_y, dilation_x, near_y, near_x, columns, runs, run, n_extra, scale_log2, bound_log2,
    SIGN: tl.constexpr, SHARE: tl.constexpr,
    TZ: tl.constexpr, TY: tl.constexpr, TX: tl.constexpr, BLOCK_N: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr,
    DILATED: tl.constexpr, STRIDED: tl.constexpr, BITS: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    CAUSAL_Z: tl.constexpr, CAUSAL_Y: tl.constexpr, CAUSAL_X: tl.constexpr, CUT: tl.constexpr, SINGLE: tl.constexpr,
    RUNS: tl.constexpr, BOUNDED: tl.constexpr, FREE: tl.constexpr,
    FLAT: tl.constexpr, EXTRA: tl.constexpr, LSE: tl.constexpr, WIDE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """See the module. Grid: runs of boxes, see `box_of`; heads times residues; images.

    Tensors [B, z, y, x, heads, channels] by their strides, the last of 1; SHARE: heads of queries for one of keys.
    lse_ptr: float32 [B, z, y, x, heads]. more: keys and values [B, n_extra, heads, channels] that all queries see.
    length, window, every (the stride of windows), dilation: of the axes. scale_log2: above zero; SIGN: of the scale, 0
    for none. bound_log2: of scaled scores, in powers of two, with BOUNDED. FREE: no maximum
    is looked for; boxes whose sums of weights leave LEAST to MOST are computed once more, with one.
    T: a box. C1, C2: see `part_of`, 0 for none.
    SINGLE: the plane is one chunk of C1. FLAT: the plane is one cell, and C1 is 1. RUNS: a program computes several
    boxes. WIDE: a box spans 2**31 values.
    """
    BLOCK_M: tl.constexpr = TZ * TY * TX
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    h, b, boxes, axis, plane = frame_of(
        near_y, near_x, columns, runs, run, length_z, length_y, length_x, window_y, window_x, every_y, every_x,
        dilation_z, dilation_y, dilation_x, m, TZ, TY, TX, DILATED, STRIDED, CAUSAL_Y, CAUSAL_X, CUT, False,
    )  # fmt: skip
    q_strides, o_strides = (
        widened(stride_qz, stride_qy, stride_qx, WIDE), widened(stride_oz, stride_oy, stride_ox, WIDE)
    )  # fmt: skip
    k_strides, v_strides = (
        widened(stride_kz, stride_ky, stride_kx, WIDE), widened(stride_vz, stride_vy, stride_vx, WIDE)
    )  # fmt: skip
    l_strides = widened(stride_lz, stride_ly, stride_lx, WIDE)
    q_ptr += b * stride_qb + h * stride_qh + offset(0, plane[0], plane[1], q_strides)
    o_ptr += b * stride_ob + h * stride_oh + offset(0, plane[0], plane[1], o_strides)
    k_ptr += b * stride_kb + h // SHARE * stride_kh + offset(0, plane[4], plane[5], k_strides)
    v_ptr += b * stride_vb + h // SHARE * stride_vh + offset(0, plane[4], plane[5], v_strides)
    steps = (
        walked(k_strides, dilation_z, dilation_y, dilation_x), walked(v_strides, dilation_z, dilation_y, dilation_x)
    )  # fmt: skip
    if LSE:
        lse_ptr += b * stride_lb + h + offset(0, plane[0], plane[1], l_strides)
    if EXTRA:
        more_k_ptr += b * stride_mkb + h // SHARE * stride_mkh
        more_v_ptr += b * stride_mvb + h // SHARE * stride_mvh
    more = more_k_ptr, more_v_ptr, stride_mkn, stride_mvn
    chunk = n, n, n
    if SINGLE:
        chunk = chunk_at(0, n, (k_ptr, v_ptr, steps[0], steps[1]), plane, C1, BITS)
    if boxes <= 0:
        return
    at = q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr
    strides = q_strides, k_strides, v_strides, o_strides, l_strides, steps
    walk = axis, window_z, every_z, dilation_z
    least = tl.full((BLOCK_M,), 1.0, tl.float32)
    most = least
    # Without a loop the compiler needs fewer registers. In one, another for the boxes that are computed once more does.
    for number in range(boxes if RUNS else 1):
        l_i = attend_box(
            number, at, strides, walk, chunk, m, n, plane, more, n_extra, scale_log2, bound_log2,
            SIGN, TZ, TY, TX, BLOCK_N, C1, C2, STRIDED, BITS, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, CAUSAL_Z, CUT,
            SINGLE, BOUNDED or FREE, FREE and not RUNS, FLAT, EXTRA, LSE, NUM_STAGES,
        )  # fmt: skip
        least = tl.minimum(least, l_i)
        most = tl.maximum(most, l_i)
    if FREE and RUNS:
        for number in range(tl.where(far(least, most), boxes, 0)):
            attend_box(
                number, at, strides, walk, chunk, m, n, plane, more, n_extra, scale_log2, bound_log2,
                SIGN, TZ, TY, TX, BLOCK_N, C1, C2, STRIDED, BITS, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, CAUSAL_Z, CUT,
                SINGLE, False, False, FLAT, EXTRA, LSE, NUM_STAGES,
            )  # fmt: skip


@triton.jit
def query_gradients(
    part, n, queries, tokens, windows, plane, state, scale_log2,
    C: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """``(dq0, dq1)`` after a part of the plane. queries: q0, q1, do0, do1, lse in base 2, delta. See `attend_part`."""
    PLACES: tl.constexpr = BLOCK_N // C
    for i in range(part[1]):
        keys, values, b_plane = chunk_at(part[0] + i * C, n, tokens, plane, C, BITS)
        for j in tl.range(0, (windows[2] + PLACES - 1) // PLACES, num_stages=NUM_STAGES):
            b_s = hidden_at(j * PLACES, n, b_plane, windows[0], windows[1], C, BLOCK_N)
            at_k, rows = step_at(j * PLACES, n, windows[2], keys, tokens[2], C, BLOCK_N)
            b_k0, b_k1 = load_rows(tokens[0] + at_k, rows, 1, HEAD_DIM, D0, D1)
            b_s = scores_from(b_s, queries, b_k0, b_k1, D1)
            at_v, rows = step_at(j * PLACES, n, windows[2], values, tokens[3], C, BLOCK_N)
            b_v0, b_v1 = load_rows(tokens[1] + at_v, rows, 1, VALUE_DIM, V0, V1)
            state = query_gradient_step(b_s, b_k0, b_k1, b_v0, b_v1, queries, state, scale_log2, D1, V1)
    return state


@triton.jit
def query_gradient_step(b_s, b_k0, b_k1, b_v0, b_v1, queries, state, scale_log2, D1: tl.constexpr, V1: tl.constexpr):
    """``(dq0, dq1)`` after a step with scores `b_s`."""
    b_p = tl.exp2(b_s * scale_log2 - queries[4][:, None])
    b_dp = tl.dot(queries[2], tl.trans(b_v0), input_precision="ieee")
    if V1:
        b_dp = tl.dot(queries[3], tl.trans(b_v1), b_dp, input_precision="ieee")
    b_ds = (b_p * (b_dp - queries[5][:, None])).to(b_k0.dtype)
    dq0 = tl.dot(b_ds, b_k0, state[0], input_precision="ieee")
    dq1 = state[1]
    if D1:
        dq1 = tl.dot(b_ds, b_k1, dq1, input_precision="ieee")
    return dq0, dq1


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def tilewright_neighborhood_queries(
    dq_ptr, q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, more_k_ptr, more_v_ptr,
    stride_dqb, stride_dqz, stride_dqy, stride_dqx, stride_dqh,
    stride_qb, stride_qz, stride_qy, stride_qx, stride_qh, stride_kb, stride_kz, stride_ky, stride_kx, stride_kh,
    stride_vb, stride_vz, stride_vy, stride_vx, stride_vh, stride_ob, stride_oz, stride_oy, stride_ox, stride_oh,
    stride_dob, stride_doz, stride_doy, stride_dox, stride_doh, stride_lb, stride_lz, stride_ly, stride_lx,
    stride_mkb, stride_mkn, stride_mkh, stride_mvb, stride_mvn, stride_mvh,
    length_z, length_y, length_x, window_z, window_y, window_x, every_z, every_y, every_x,
    dilation_z, dilation_y, dilation_x, near_y, near_x, columns, runs, run, n_extra, scale_log2, scale,
    SIGN: tl.constexpr, SHARE: tl.constexpr,
    TZ: tl.constexpr, TY: tl.constexpr, TX: tl.constexpr, BLOCK_N: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr,
    DILATED: tl.constexpr, STRIDED: tl.constexpr, BITS: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    CAUSAL_Z: tl.constexpr, CAUSAL_Y: tl.constexpr, CAUSAL_X: tl.constexpr, CUT: tl.constexpr,
    EXTRA: tl.constexpr, WIDE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of queries. Arguments and grid as of `tilewright_neighborhood`; do: the gradients of its result o;
    delta_ptr: is written, float32, the sum of both's products for each query and head, laid out as lse is. scale: as it
    is."""
    BLOCK_M: tl.constexpr = TZ * TY * TX
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    h, b, boxes, axis, plane = frame_of(
        near_y, near_x, columns, runs, run, length_z, length_y, length_x, window_y, window_x, every_y, every_x,
        dilation_z, dilation_y, dilation_x, m, TZ, TY, TX, DILATED, STRIDED, CAUSAL_Y, CAUSAL_X, CUT, False,
    )  # fmt: skip
    q_strides, o_strides = (
        widened(stride_qz, stride_qy, stride_qx, WIDE), widened(stride_oz, stride_oy, stride_ox, WIDE)
    )  # fmt: skip
    k_strides, v_strides = (
        widened(stride_kz, stride_ky, stride_kx, WIDE), widened(stride_vz, stride_vy, stride_vx, WIDE)
    )  # fmt: skip
    do_strides = widened(stride_doz, stride_doy, stride_dox, WIDE)
    l_strides = widened(stride_lz, stride_ly, stride_lx, WIDE)
    dq_strides = widened(stride_dqz, stride_dqy, stride_dqx, WIDE)
    q_ptr += b * stride_qb + h * stride_qh + offset(0, plane[0], plane[1], q_strides)
    o_ptr += b * stride_ob + h * stride_oh + offset(0, plane[0], plane[1], o_strides)
    do_ptr += b * stride_dob + h * stride_doh + offset(0, plane[0], plane[1], do_strides)
    dq_ptr += b * stride_dqb + h * stride_dqh + offset(0, plane[0], plane[1], dq_strides)
    k_ptr += b * stride_kb + h // SHARE * stride_kh + offset(0, plane[4], plane[5], k_strides)
    v_ptr += b * stride_vb + h // SHARE * stride_vh + offset(0, plane[4], plane[5], v_strides)
    steps = (
        walked(k_strides, dilation_z, dilation_y, dilation_x), walked(v_strides, dilation_z, dilation_y, dilation_x)
    )  # fmt: skip
    of_rows = b * stride_lb + h + offset(0, plane[0], plane[1], l_strides)
    if EXTRA:
        more_k_ptr += b * stride_mkb + h // SHARE * stride_mkh
        more_v_ptr += b * stride_mvb + h // SHARE * stride_mvh
    if boxes <= 0:
        return
    for number in range(1):
        box_z, rows_z, in_z, start_z, windows = walk_of(
            axis, number, m, window_z, every_z, dilation_z, TZ, TY * TX, STRIDED, CAUSAL_Z, CUT, False
        )
        m_rows = in_z & plane[6]
        tokens = k_ptr + start_z * k_strides[0], v_ptr + start_z * v_strides[0], steps[0], steps[1]
        rows = offset(rows_z, plane[2], plane[3], q_strides)
        b_q0, b_q1 = load_rows(q_ptr + box_z * q_strides[0], rows, 1, HEAD_DIM, D0, D1)
        if SIGN != 1:
            b_q0, b_q1 = b_q0 * SIGN, b_q1 * SIGN
        rows = offset(rows_z, plane[2], plane[3], o_strides)
        b_o0, b_o1 = load_rows(o_ptr + box_z * o_strides[0], rows, 1, VALUE_DIM, V0, V1)
        rows = offset(rows_z, plane[2], plane[3], do_strides)
        b_do0, b_do1 = load_rows(do_ptr + box_z * do_strides[0], rows, 1, VALUE_DIM, V0, V1)
        delta = tl.sum(b_o0.to(tl.float32) * b_do0.to(tl.float32), 1)
        if V1:
            delta += tl.sum(b_o1.to(tl.float32) * b_do1.to(tl.float32), 1)
        at = of_rows + box_z * l_strides[0] + offset(rows_z, plane[2], plane[3], l_strides)
        tl.store(delta_ptr + at, delta, mask=m_rows)
        queries = b_q0, b_q1, b_do0, b_do1, tl.load(lse_ptr + at) / LN2, delta
        state = tl.zeros((BLOCK_M, D0), tl.float32), tl.zeros((BLOCK_M, D1 if D1 else 1), tl.float32)
        cells = plane[11] * plane[12]
        state = query_gradients(
            part_of(cells, 0, BLOCK_N, C1, C2), n, queries, tokens, windows, plane, state, scale_log2,
            BLOCK_N, BLOCK_N, BITS, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, NUM_STAGES,
        )  # fmt: skip
        if C1:
            state = query_gradients(
                part_of(cells, 1, BLOCK_N, C1, C2), n, queries, tokens, windows, plane, state, scale_log2,
                C1, BLOCK_N, BITS, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, NUM_STAGES,
            )  # fmt: skip
        if C2:
            state = query_gradients(
                part_of(cells, 2, BLOCK_N, C1, C2), n, queries, tokens, windows, plane, state, scale_log2,
                C2, BLOCK_N, BITS, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, NUM_STAGES,
            )  # fmt: skip
        if EXTRA:
            for j in tl.range(0, n_extra, BLOCK_N):
                more = tl.minimum(j + n, n_extra - 1)
                b_s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32) + tl.where(j + n < n_extra, 0.0, HIDDEN)[None, :]
                b_k0, b_k1 = load_rows(more_k_ptr, more, stride_mkn, HEAD_DIM, D0, D1)
                b_s = scores_from(b_s, queries, b_k0, b_k1, D1)
                b_v0, b_v1 = load_rows(more_v_ptr, more, stride_mvn, VALUE_DIM, V0, V1)
                state = query_gradient_step(b_s, b_k0, b_k1, b_v0, b_v1, queries, state, scale_log2, D1, V1)
        rows = offset(rows_z, plane[2], plane[3], dq_strides)
        dq0, dq1 = state[0] * scale, state[1] * scale
        write_rows(dq_ptr + box_z * dq_strides[0], rows, 1, dq0, dq1, m_rows, HEAD_DIM, D0, D1)


@triton.jit
def key_gradients(
    part, n, keys, tokens, windows, plane, state, scale_log2,
    C: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, SIGN: tl.constexpr, HEAD_DIM: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """``(dk0, dk1, dv0, dv1)`` after a part of the plane of queries that see a box of keys.

    keys: blocks of keys and values, two each. tokens: queries, gradients of results, log-sum-exps and deltas, and the
    strides of these, the last two's shared. windows: of the queries that see each key, see `attend_part`.
    """
    extent_z = windows[2]
    dk0, dk1, dv0, dv1 = state
    PLACES: tl.constexpr = BLOCK_N // C
    for i in range(part[1]):
        y, x, there = cells_at(part[0] + i * C + n % C, plane)
        q_at = y * tokens[4][1] + x * tokens[4][2]
        o_at = y * tokens[5][1] + x * tokens[5][2]
        l_at = y * tokens[6][1] + x * tokens[6][2]
        b_plane = hidden_in_plane(y, x, there, plane, BITS)
        for j in tl.range(0, (extent_z + PLACES - 1) // PLACES, num_stages=NUM_STAGES):
            b_s = hidden_at(j * PLACES, n, b_plane, windows[0], windows[1], C, BLOCK_N)
            step, rows = step_at(j * PLACES, n, extent_z, q_at, tokens[4], C, BLOCK_N)
            b_q0, b_q1 = load_rows(tokens[0] + step, rows, 1, HEAD_DIM, D0, D1)
            if SIGN != 1:
                b_q0, b_q1 = b_q0 * SIGN, b_q1 * SIGN
            step, rows = step_at(j * PLACES, n, extent_z, o_at, tokens[5], C, BLOCK_N)
            b_do0, b_do1 = load_rows(tokens[1] + step, rows, 1, VALUE_DIM, V0, V1)
            step, rows = step_at(j * PLACES, n, extent_z, l_at, tokens[6], C, BLOCK_N)
            lse, delta = tl.load(tokens[2] + step + rows) / LN2, tl.load(tokens[3] + step + rows)
            b_s = scores_from(b_s, keys, b_q0, b_q1, D1)  # [BLOCK_M, BLOCK_N], keys by queries
            b_p = tl.exp2(b_s * scale_log2 - lse[None, :])
            b_w = b_p.to(b_do0.dtype)
            dv0 = tl.dot(b_w, b_do0, dv0, input_precision="ieee")
            b_dp = tl.dot(keys[2], tl.trans(b_do0), input_precision="ieee")
            if V1:
                dv1 = tl.dot(b_w, b_do1, dv1, input_precision="ieee")
                b_dp = tl.dot(keys[3], tl.trans(b_do1), b_dp, input_precision="ieee")
            b_ds = (b_p * (b_dp - delta[None, :])).to(b_q0.dtype)
            dk0 = tl.dot(b_ds, b_q0, dk0, input_precision="ieee")
            if D1:
                dk1 = tl.dot(b_ds, b_q1, dk1, input_precision="ieee")
    return dk0, dk1, dv0, dv1


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def tilewright_neighborhood_keys(
    dk_ptr, dv_ptr, q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr,
    stride_dkb, stride_dkz, stride_dky, stride_dkx, stride_dkh, stride_dvb, stride_dvz, stride_dvy, stride_dvx,
    stride_dvh, stride_qb, stride_qz, stride_qy, stride_qx, stride_qh, stride_kb, stride_kz, stride_ky, stride_kx,
    stride_kh, stride_vb, stride_vz, stride_vy, stride_vx, stride_vh, stride_ob, stride_oz, stride_oy, stride_ox,
    stride_oh, stride_lb, stride_lz, stride_ly, stride_lx,
    length_z, length_y, length_x, window_z, window_y, window_x, every_z, every_y, every_x,
    dilation_z, dilation_y, dilation_x, near_y, near_x, columns, runs, run, scale_log2, scale,
    SIGN: tl.constexpr, SHARE: tl.constexpr,
    TZ: tl.constexpr, TY: tl.constexpr, TX: tl.constexpr, BLOCK_N: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr,
    DILATED: tl.constexpr, STRIDED: tl.constexpr, BITS: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    CAUSAL_Z: tl.constexpr, CAUSAL_Y: tl.constexpr, CAUSAL_X: tl.constexpr, CUT: tl.constexpr,
    WIDE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values; the grid is of boxes of keys and their heads. o: the strides of do. All else as of
    `tilewright_neighborhood_queries`, which has written the deltas."""
    BLOCK_M: tl.constexpr = TZ * TY * TX
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    h, b, boxes, axis, plane = frame_of(
        near_y, near_x, columns, runs, run, length_z, length_y, length_x, window_y, window_x, every_y, every_x,
        dilation_z, dilation_y, dilation_x, m, TZ, TY, TX, DILATED, STRIDED, CAUSAL_Y, CAUSAL_X, CUT, True,
    )  # fmt: skip
    q_strides, o_strides = (
        widened(stride_qz, stride_qy, stride_qx, WIDE), widened(stride_oz, stride_oy, stride_ox, WIDE)
    )  # fmt: skip
    k_strides, v_strides = (
        widened(stride_kz, stride_ky, stride_kx, WIDE), widened(stride_vz, stride_vy, stride_vx, WIDE)
    )  # fmt: skip
    l_strides = widened(stride_lz, stride_ly, stride_lx, WIDE)
    dk_strides, dv_strides = (
        widened(stride_dkz, stride_dky, stride_dkx, WIDE), widened(stride_dvz, stride_dvy, stride_dvx, WIDE)
    )  # fmt: skip
    k_ptr += b * stride_kb + h * stride_kh + offset(0, plane[0], plane[1], k_strides)
    v_ptr += b * stride_vb + h * stride_vh + offset(0, plane[0], plane[1], v_strides)
    dk_ptr += b * stride_dkb + h * stride_dkh + offset(0, plane[0], plane[1], dk_strides)
    dv_ptr += b * stride_dvb + h * stride_dvh + offset(0, plane[0], plane[1], dv_strides)
    q_ptr += b * stride_qb + h * SHARE * stride_qh + offset(0, plane[4], plane[5], q_strides)
    do_ptr += b * stride_ob + h * SHARE * stride_oh + offset(0, plane[4], plane[5], o_strides)
    lse_ptr += b * stride_lb + h * SHARE + offset(0, plane[4], plane[5], l_strides)
    delta_ptr += b * stride_lb + h * SHARE + offset(0, plane[4], plane[5], l_strides)
    if boxes <= 0:
        return
    for number in range(1):
        box_z, rows_z, in_z, start_z, windows = walk_of(
            axis, number, m, window_z, every_z, dilation_z, TZ, TY * TX, STRIDED, CAUSAL_Z, CUT, True
        )
        m_rows = in_z & plane[6]
        rows = offset(rows_z, plane[2], plane[3], k_strides)
        b_k0, b_k1 = load_rows(k_ptr + box_z * k_strides[0], rows, 1, HEAD_DIM, D0, D1)
        rows = offset(rows_z, plane[2], plane[3], v_strides)
        b_v0, b_v1 = load_rows(v_ptr + box_z * v_strides[0], rows, 1, VALUE_DIM, V0, V1)
        keys = b_k0, b_k1, b_v0, b_v1
        dk0 = tl.zeros((BLOCK_M, D0), tl.float32)
        dk1 = tl.zeros((BLOCK_M, D1 if D1 else 1), tl.float32)
        dv0 = tl.zeros((BLOCK_M, V0), tl.float32)
        dv1 = tl.zeros((BLOCK_M, V1 if V1 else 1), tl.float32)
        state = dk0, dk1, dv0, dv1
        cells = plane[11] * plane[12]
        for i in range(SHARE):
            at = start_z * l_strides[0] + i
            tokens = (
                q_ptr + start_z * q_strides[0] + i * stride_qh, do_ptr + start_z * o_strides[0] + i * stride_oh,
                lse_ptr + at, delta_ptr + at, walked(q_strides, dilation_z, dilation_y, dilation_x),
                walked(o_strides, dilation_z, dilation_y, dilation_x),
                walked(l_strides, dilation_z, dilation_y, dilation_x),
            )  # fmt: skip
            state = key_gradients(
                part_of(cells, 0, BLOCK_N, C1, C2), n, keys, tokens, windows, plane, state, scale_log2,
                BLOCK_N, BLOCK_N, BITS, SIGN, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, NUM_STAGES,
            )  # fmt: skip
            if C1:
                state = key_gradients(
                    part_of(cells, 1, BLOCK_N, C1, C2), n, keys, tokens, windows, plane, state, scale_log2,
                    C1, BLOCK_N, BITS, SIGN, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, NUM_STAGES,
                )  # fmt: skip
            if C2:
                state = key_gradients(
                    part_of(cells, 2, BLOCK_N, C1, C2), n, keys, tokens, windows, plane, state, scale_log2,
                    C2, BLOCK_N, BITS, SIGN, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, NUM_STAGES,
                )  # fmt: skip
        rows = offset(rows_z, plane[2], plane[3], dk_strides)
        dk0, dk1 = state[0] * (scale * SIGN), state[1] * (scale * SIGN)
        write_rows(dk_ptr + box_z * dk_strides[0], rows, 1, dk0, dk1, m_rows, HEAD_DIM, D0, D1)
        rows = offset(rows_z, plane[2], plane[3], dv_strides)
        write_rows(dv_ptr + box_z * dv_strides[0], rows, 1, state[2], state[3], m_rows, VALUE_DIM, V0, V1)
