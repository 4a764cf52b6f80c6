"""SGLang's kernels. With `--attention-backend torch_native` it calls one of them; that one is here."""

from functools import partial

import absent

__path__: list[str] = []
__getattr__ = partial(absent.look_up, __name__)
absent.declare(__name__, ["elementwise", "flash_attn", "kvcacheio", "mamba", "quantization"])


def assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, batch_size=None):
    """Writes the new KV cache slots of each request into its row of `table`; `slots` has them one after the other."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[done : done + end - start].to(table.dtype)
        done += end - start
