"""Stage 03: prefill and decode, two machines.

A pass takes the longer of two times: that of reading its bytes from memory, and that of doing its arithmetic. Here you count
both, predict with them, and then measure whether the prediction holds on the machine in front of you.

**The matrices.** Each layer has q [heads * dim, hidden], k and v [kv_heads * dim, hidden] each, o [hidden, heads * dim], and
gate, up and down, hidden times intermediate each. After the layers comes the head [vocabulary, hidden]. The model says
num_layers, num_heads, num_kv_heads, head_dim, hidden_size, intermediate_size, vocabulary and dtype.

**A pass** here is one over `tokens` new tokens after `context` kept ones: prefill is (n, 0), decode is (1, n). The logits of
its last position alone are computed.

    bytes   every matrix once, however many tokens there are, in model.dtype; and the keys and values of all
            context + tokens positions once. (Embedding rows, norms and what is written are left out: they are small.)
    FLOP    a multiply and an add are two. Each matrix of a layer: 2 x its numbers, per token. The head: for one position.
            Attention, per layer: every query head of every token against all context + tokens keys, 2 x dim for the score
            and 2 x dim for the weighted sum. (What the mask hides is computed, too, and counted.)

Norms, rotation and softmax are not counted anywhere in this stage.

    .venv/bin/python -c "from app.s03_roofline import *; from course.given.torch_model import load
    model = load('real'); print(intensity(model, 512), intensity(model, 1, 512), 'FLOP a byte')"
"""

from __future__ import annotations

import torch  # noqa: F401  you will need it
from course.given.torch_model import Model, attend  # noqa: F401


def model_bytes(model: Model) -> int:
    """Bytes of the matrices that one pass reads. Trap: an embedding that is the head's own matrix ("tied") is one matrix, and
    an embedding of its own is not read but looked up: either way vocabulary x hidden counts once."""
    raise NotImplementedError


def pass_bytes(model: Model, tokens: int, context: int = 0) -> int:
    """Bytes that a pass reads: `model_bytes`, and keys and values (key heads, as in stage 02)."""
    raise NotImplementedError


def pass_flop(model: Model, tokens: int, context: int = 0) -> int:
    """FLOP of a pass, exactly. It is checked against what PyTorch counts while a pass runs."""
    raise NotImplementedError


def intensity(model: Model, tokens: int, context: int = 0) -> float:
    """FLOP for each byte, of the same pass."""
    raise NotImplementedError


def predicted_seconds(model: Model, tokens: int, context: int, bandwidth: float, flop_rate: float) -> float:
    """What a pass takes on a machine that reads `bandwidth` bytes a second and does `flop_rate` FLOP a second. Both go on at
    the same time, so it is neither their sum nor the shorter one."""
    raise NotImplementedError


def achieved_bandwidth(num_bytes: float, seconds: float) -> float:
    """Bytes a second (not GB, not GiB): 14e9 bytes in 0.037 s are 3.78e11."""
    raise NotImplementedError


def prefill_seconds(model: Model, num_tokens: int) -> float:
    """Measures one pass over `num_tokens` tokens with nothing before them: seconds of the *whole pass*, a float.

    Make the pass with `embed`, `qkv`, `attend`, `finish` and `logits`, as in stage 02; which ids does not matter. It is asked
    about 256 tokens of a 135 M model on a CPU, 2,048 on a GPU: about a second a call is enough.

    Traps, here and below:
    - The first call pays for more than its work (memory, tables, kernels chosen). Make one that is not measured, then take
      the median of a few. Tensors that a pass only reads are made before the clock starts.
    - `model.clock()` answers seconds, for differences. On a CPU it is the time of this process alone, so that other programs
      do not count. On a GPU a call returns long before its work is done; this clock waits for it, `time.time()` does not.
    - Logits of every position are a quarter as much work again as all layers of this model.
    - Without `torch.inference_mode()` you measure autograd, too.
    """
    raise NotImplementedError


def decode_seconds(model: Model, context: int) -> float:
    """Measures one pass over one token after `context` kept ones: seconds of *one token*, a float.

    The kept keys and values can hold anything: their values make no difference to the time. So do not run a prefill to get
    them; make tensors of that shape, for each layer its own, and fill them. (`torch.zeros` is a trap: a system may give the
    same empty page for all of it, and reading that is too cheap.) Put the new key and value in place; `torch.cat` copies the
    whole context for every token and layer, and you would measure the copy.
    """
    raise NotImplementedError
