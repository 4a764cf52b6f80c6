"""Makes a Hugging Face folder of a GGUF file: `convert_gguf.py FILE FOLDER`, run by the python of `make sglang-cpu`.

SGLang on a CPU serves no GGUF; and so it answers with the very weights that llama.cpp has in the demo.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

source, folder = Path(sys.argv[1]), sys.argv[2]
tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
# Into a model that was never quantised: the one that was read says it still is, and cannot be saved.
config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.load_state_dict(read.state_dict())
model.generation_config = GenerationConfig(
    bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
)
tokenizer.save_pretrained(folder)
model.save_pretrained(folder)
