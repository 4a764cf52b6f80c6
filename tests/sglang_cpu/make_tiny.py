"""Makes a tiny random model that reasons: `make_tiny.py FOLDER`, run by the python of `make sglang-cpu`.

4,096 tokens and two layers, 1.2 MB: what it says is noise, but it says it as a reasoning model does. Its template opens
`<think>`, as Kimi-K2.5's does; every token closes the reasoning with chance CLOSES and ends the answer with chance ENDS,
so lengths vary as they do in earnest. Never send it an id that it lacks: on a CPU that ends the whole server.
"""

import math
import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CLOSES, ENDS = 1 / 60, 1 / 200
VOCABULARY = 4096
BOS, EOS, ROLES = "<|begin|>", "<|end|>", ("system", "user", "assistant", "tool")
OPEN, CLOSE = "<think>", "</think>"
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|><think>{%- if thinking is false -%}</think>{%- endif -%}{%- endif -%}"""
NEVER = -20.0  # logit of the control tokens


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of Python's standard library: the one text that is on every machine that runs this."""
    control = [BOS, EOS, *(f"<|{role}|>" for role in ROLES)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2,
        special_tokens=control,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_path("stdlib"))
    bpe.train([str(path) for path in sorted(library.glob("*.py"))[:120]], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=EOS, chat_template=TEMPLATE
    )
    tokenizer.add_tokens([OPEN, CLOSE])
    return tokenizer


@torch.no_grad()
def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Random weights, but for the tokens whose chance is set.

    One feature of the residual stream is the same for every token and no layer writes to it. A token whose output
    weights are zero elsewhere therefore has the same logit everywhere.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=65536,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    embeddings, output = model.model.embed_tokens.weight, model.lm_head.weight
    embeddings.normal_(0, 0.1)
    embeddings[:, 0] = 2.0
    output.normal_(0, 0.25)
    output[:, 0] = 0.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    hidden = model.model(torch.randint(len(tokenizer), (1, 512))).last_hidden_state[0]
    constant = hidden[:, 0].mean().item()
    everything = model.lm_head(hidden).logsumexp(-1).mean().item()

    def fix(token: str, logit: float) -> None:
        row = tokenizer.convert_tokens_to_ids(token)
        output[row] = 0.0
        output[row, 0] = logit / constant

    for token in tokenizer.all_special_tokens + [f"<|{role}|>" for role in ROLES] + [OPEN]:
        fix(token, NEVER)
    fix(EOS, everything + math.log(ENDS))
    fix(CLOSE, everything + math.log(CLOSES))
    return model.to(torch.bfloat16)


if __name__ == "__main__":
    folder = sys.argv[1]
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(folder)
    make_model(tokenizer).save_pretrained(folder)
