"""Stage 02: the KV cache.

Attention is the one place where a token looks at others, and all that it needs of them is their key and their value. Both
follow from the token, its position and what is before it, so they never change. Keep them, and the next token costs a pass
over *one* position.

From here on you call the model in pieces (course/given/torch_model.py), because what lies between them is yours:

    x = model.embed(ids)                         # int64 [1, tokens] -> [1, tokens, hidden]; begins a forward pass
    for layer in model.layers:
        q, k, v = layer.qkv(x, positions)        # q [1, tokens, heads, dim]; k, v [1, tokens, kv_heads, dim]
        x = layer.finish(x, attend(q, all_k, all_v, mask))
    logits = model.logits(x)                     # [1, tokens, vocabulary]; give it x[:, -1:], the one row that you read

    positions   int64 [tokens], the place of each token in the whole sequence, from 0. q and k are rotated by it.
    attend      softmax(q k^T / sqrt(dim)) v over all keys that you give. It knows that several query heads share one key
                head. mask: bool [tokens, keys], True where a query may look; None: everywhere.

The two passes that there are:

    prefill     tokens = the prompt, positions 0 .. p - 1, each looks at itself and at those before it
    decode      tokens = the newest id alone, at the position after the last kept one; it looks at all that is kept

Try it:

    .venv/bin/python -c "from app.s02_cache import *; from course.given.torch_model import load
    model = load(); print(cached_generate(model, [5, 6, 7], 8), model.counts.positions, 'positions')"
"""

from __future__ import annotations

import torch  # noqa: F401  you will need it
from course.given.torch_model import Model, attend  # noqa: F401


def cached_generate(model: Model, prompt: list[int], max_tokens: int) -> list[int]:
    """What `naive_generate` of stage 01 answers, id by id and with the same rules for max_tokens and eos, and the prompt
    left as it was; but each position is computed once.

    For g answered ids after a prompt of p: exactly g forward passes (calls of `embed`), the first over the whole prompt, the
    others over one id each, and p + g - 1 positions through each layer. The last id is never fed: nobody asks what follows.

    Keys and values are yours to keep, per layer, for the length of this call. How: tensors that grow by `torch.cat`, or room
    for prompt and answer taken once and filled (`torch.cat` copies all that is kept, for every token and layer). Every call
    begins with none, and when it has returned no tensor of it is alive: two calls have nothing to do with each other.

    Traps; each of them answers fluent text of the right length:
    - The prompt needs a causal mask. Without one its tokens see their own future, which they never do while decoding.
    - A decoded token has a position, and it is not 0: it is the number of tokens before it.
    - Each layer has its own keys and values. One cache for all of them runs, too.
    - Feeding the prompt again beside the newest id is right, and is stage 01.
    - Calling `embed` on the newest id, but the layers on all of them, is stage 01 as well: positions are counted in the
      layers.
    - A list as a default argument, or in the module, is the same list at the next call.
    """
    raise NotImplementedError


def kv_bytes_per_token(model: Model) -> int:
    """Bytes that the keys and values of one token take, over all layers, in model.dtype.

    The model says: num_layers, num_heads, num_kv_heads, head_dim, hidden_size, dtype (`torch.float32.itemsize` is 4). Models
    differ in all of them, and head_dim need not be hidden_size / num_heads.

    Trap: heads that are kept are key heads. A formula with query heads is too large by the factor for which grouped-query
    attention was invented.
    """
    raise NotImplementedError
