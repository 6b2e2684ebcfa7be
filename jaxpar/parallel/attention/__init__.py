import jax, jax.numpy as jnp
def choose(implementation, **kw): return "reference", "temporary"
def attention(q, k, v, *, segment_ids_BT, window, softcap, scale, implementation, block):
    s = jnp.einsum("btkgn,bskn->bkgts", q, k, preferred_element_type=jnp.float32) * scale
    if softcap: s = softcap * jnp.tanh(s / softcap)
    T = q.shape[1]; i = jnp.arange(T)
    m = i[:, None] >= i[None]
    if window: m &= i[:, None] - i[None] < window
    m = m[None]
    if segment_ids_BT is not None: m = m & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None])
    s = jnp.where(m[:, None, None], s, -1e30)
    p = jax.nn.softmax(s, axis=-1).astype(q.dtype)
    return jnp.einsum("bkgts,bskn->btkgn", p, v)
