"""Write the demo model as a Hugging Face directory, for servers that read no GGUF.

    python -m benchmarks.serve.as_safetensors DIR [--dtype float32]

transformers dequantises the weights; the tokenizer is ours, because transformers' reading of this GGUF loses the rule
that splits digits one by one. The numbers are those that our engine computes with, to the rounding of `--dtype`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from splitserve.gguf_header import read_header
from splitserve.text import gguf_tokenizer
from splitserve.weights.locate import locate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    path = locate("smollm2-135m").path
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.config.rms_norm_eps = 1e-5
    model.hf_quantizer, model.is_quantized = None, False  # the numbers are plain by now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(getattr(torch, args.dtype)).save_pretrained(args.directory)
    metadata = read_header(path).metadata
    gguf_tokenizer.build(metadata, path).save(str(args.directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": metadata["tokenizer.chat_template"],
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }
    (args.directory / "tokenizer_config.json").write_text(json.dumps(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
