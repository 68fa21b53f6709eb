"""A GGUF file of the llama family as a folder that Hugging Face's readers take. Runs in a server's environment, with
numpy, gguf and safetensors: ``python weights.py FILE FOLDER [--tokenizer]``, the latter without the weights.

llama.cpp keeps the rows of the query and key matrices in another order (pairs of a rotation side by side), which is
undone here; everything else is renamed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPECIAL = 3  # a kind of token


class Model:
    def __init__(self, file: Path) -> None:
        self._reader = GGUFReader(file)
        if self["general.architecture"] != "llama":
            raise SystemExit(f"{file} is not of the llama family")

    def __getitem__(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def llama(self, key: str) -> Any:
        return self[f"llama.{key}"]

    def token(self, kind: str) -> Any:
        return self[f"tokenizer.ggml.{kind}"]

    def weights(self) -> dict[str, np.ndarray]:
        heads = {"attn_q": self.llama("attention.head_count"), "attn_k": self.llama("attention.head_count_kv")}
        found = {}
        for tensor in self._reader.tensors:
            layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
            part = layer[2] if layer else tensor.name.removesuffix(".weight")
            matrix = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            if part in heads:
                rows = matrix.reshape(heads[part], -1, 2, matrix.shape[-1])
                matrix = rows.swapaxes(1, 2).reshape(matrix.shape)
            name = f"model.layers.{layer[1]}.{NAMES[part]}" if layer else NAMES[part]
            found[f"{name}.weight"] = np.ascontiguousarray(matrix)
        return found

    def config(self, tied: bool) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "hidden_size": self.llama("embedding_length"),
            "intermediate_size": self.llama("feed_forward_length"),
            "num_hidden_layers": self.llama("block_count"),
            "num_attention_heads": self.llama("attention.head_count"),
            "num_key_value_heads": self.llama("attention.head_count_kv"),
            "head_dim": self.llama("rope.dimension_count"),
            "hidden_act": "silu",
            "max_position_embeddings": self.llama("context_length"),
            "rms_norm_eps": 1e-5,
            "rope_theta": self.llama("rope.freq_base"),
            "tie_word_embeddings": tied,
            "vocab_size": self.llama("vocab_size"),
            **self.ends(),
        }

    def ends(self) -> dict[str, int]:
        return {f"{end}_token_id": self.token(f"{name}_token_id") for end, name in _ENDS.items()}

    def tokenizer(self) -> dict[str, object]:
        tokens, kinds = self.token("tokens"), self.token("token_type")
        added = [
            {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": True}
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == SPECIAL
        ]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        return {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, level],
            },
            "decoder": level,
            "model": {
                "type": "BPE",
                "vocab": {token: number for number, token in enumerate(tokens)},
                "merges": self.token("merges"),
            },
        }

    def tokenizer_config(self) -> dict[str, object]:
        tokens = self.token("tokens")
        named = {name.replace("_id", ""): tokens[number] for name, number in self.ends().items()}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.llama("context_length"),
            "chat_template": self["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            **named,
        }


_ENDS = {"bos": "bos", "eos": "eos", "pad": "padding"}


def convert(file: Path, folder: Path, *, tokenizer_only: bool) -> None:
    model = Model(file)
    folder.mkdir(parents=True, exist_ok=True)
    tied = True
    if not tokenizer_only:
        from safetensors.numpy import save_file

        weights = model.weights()
        tied = "lm_head.weight" not in weights
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").write_text(json.dumps(model.ends()))
    (folder / "tokenizer.json").write_text(json.dumps(model.tokenizer(), ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps(model.tokenizer_config()))
    (folder / "config.json").write_text(json.dumps(model.config(tied)))  # last: with it the folder is whole


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), tokenizer_only="--tokenizer" in sys.argv[3:])
