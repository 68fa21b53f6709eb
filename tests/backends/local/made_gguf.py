"""Tiny models in GGUF with random weights, of the architectures whose real files are too large for tests."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy

U32, F32, BOOL, STRING, ARRAY, I32 = 4, 6, 7, 8, 9, 5
TENSOR_F32, TENSOR_Q8_0 = 0, 8
ALIGNMENT, BLOCK = 32, 32
DIM, LAYERS, HEADS, KV_HEADS, HIDDEN = 64, 2, 4, 2, 128
HEAD = DIM // HEADS
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_gguf(path: Path, architecture: str) -> Path:
    """``architecture`` is qwen2 or qwen3."""
    tokens = [*_byte_tokens(), "he", *SPECIAL]
    fields = _fields(architecture, tokens)
    tensors = _tensors(architecture, len(tokens))
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join(fields))
    offset = 0
    for name, shape, kind, data in tensors:
        out += _string(name) + struct.pack("<I", len(shape))
        out += b"".join(struct.pack("<Q", size) for size in reversed(shape)) + struct.pack("<IQ", kind, offset)
        offset += len(_padded(data))
    out = bytearray(_padded(bytes(out)))
    for *_, data in tensors:
        out += _padded(data)
    path.write_bytes(out)
    return path


def _fields(architecture: str, tokens: list[str]) -> list[bytes]:
    numbers = {
        "block_count": LAYERS,
        "context_length": 2048,
        "embedding_length": DIM,
        "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        **({"attention.key_length": HEAD, "attention.value_length": HEAD} if architecture == "qwen3" else {}),
    }
    ids = {"eos": len(tokens) - 1, "padding": len(tokens) - 3, "bos": len(tokens) - 3}
    types = [1] * (len(tokens) - len(SPECIAL)) + [3] * len(SPECIAL)
    return [
        _field("general.architecture", STRING, _string(architecture)),
        _field("general.file_type", U32, struct.pack("<I", 7)),
        *(_field(f"{architecture}.{name}", U32, struct.pack("<I", value)) for name, value in numbers.items()),
        _field(f"{architecture}.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-6)),
        _field(f"{architecture}.rope.freq_base", F32, struct.pack("<f", 1e6)),
        _field("tokenizer.ggml.model", STRING, _string("gpt2")),
        _field("tokenizer.ggml.pre", STRING, _string("qwen2")),
        _field("tokenizer.ggml.tokens", ARRAY, _array(STRING, [_string(token) for token in tokens])),
        _field("tokenizer.ggml.token_type", ARRAY, _array(I32, [struct.pack("<i", kind) for kind in types])),
        _field("tokenizer.ggml.merges", ARRAY, _array(STRING, [_string("h e")])),
        *(_field(f"tokenizer.ggml.{name}_token_id", U32, struct.pack("<I", at)) for name, at in ids.items()),
        _field("tokenizer.ggml.add_bos_token", BOOL, b"\0"),
        _field("tokenizer.chat_template", STRING, _string(TEMPLATE)),
    ]


def _tensors(architecture: str, vocabulary: int) -> list[tuple[str, tuple[int, ...], int, bytes]]:
    random = numpy.random.default_rng(0)
    tensors: list[tuple[str, tuple[int, ...], int, bytes]] = []

    def matrix(name: str, rows: int, columns: int) -> None:
        values = random.normal(0, 0.05, (rows, columns)).astype(numpy.float32)
        tensors.append((f"{name}.weight", (rows, columns), TENSOR_Q8_0, _q8_0(values)))

    def vector(name: str, size: int, value: float = 1.0) -> None:
        tensors.append((name, (size,), TENSOR_F32, numpy.full(size, value, numpy.float32).tobytes()))

    matrix("token_embd", vocabulary, DIM)
    vector("output_norm.weight", DIM)
    matrix("output", vocabulary, DIM)
    for layer in range(LAYERS):
        at = f"blk.{layer}"
        vector(f"{at}.attn_norm.weight", DIM)
        vector(f"{at}.ffn_norm.weight", DIM)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            matrix(f"{at}.attn_{name}", heads * HEAD, DIM)
            if architecture == "qwen2":
                vector(f"{at}.attn_{name}.bias", heads * HEAD, 0.01)
            elif name != "v":
                vector(f"{at}.attn_{name}_norm.weight", HEAD)
        matrix(f"{at}.attn_output", DIM, HEADS * HEAD)
        matrix(f"{at}.ffn_gate", HIDDEN, DIM)
        matrix(f"{at}.ffn_up", HIDDEN, DIM)
        matrix(f"{at}.ffn_down", DIM, HIDDEN)
    return tensors


def _q8_0(values: numpy.ndarray) -> bytes:
    blocks = values.reshape(-1, BLOCK)
    scales = numpy.abs(blocks).max(axis=1) / 127
    whole = numpy.round(blocks / scales[:, None]).astype(numpy.int8)
    return b"".join(numpy.float16(scale).tobytes() + row.tobytes() for scale, row in zip(scales, whole, strict=True))


def _byte_tokens() -> list[str]:
    """How byte-level vocabularies write each byte: itself if it can be seen, else a letter above 255."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte if byte in seen else next(hidden)) for byte in range(256)]


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _array(kind: int, items: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


def _field(name: str, kind: int, value: bytes) -> bytes:
    return _string(name) + struct.pack("<I", kind) + value


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % ALIGNMENT)
