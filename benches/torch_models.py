"""GPT-2 and Llama in PyTorch, as plainly as their papers, and their Hugging Face folders.

`zero train --model FOLDER --data FILE` starts from the weights and tokens that write_folder writes, so losses are
comparable step by step, not only speeds.
"""

import dataclasses
import json
import math
import os
import struct

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a model. `kv_heads` and `ffn` are Llama's."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    kv_heads: int = 0
    ffn: int = 0


# Sizes of zero-models' presets of these names, and of two small models for tests of the scripts.
PRESETS = {
    "nano": Shape(4, 128, 4, 256),
    "gpt2-124m": Shape(12, 768, 12),
    "gpt2-350m": Shape(24, 1024, 16),
    "gpt2-774m": Shape(36, 1280, 20),
    "gpt2-1.5b": Shape(48, 1600, 25),
    "llama-nano": Shape(2, 64, 4, 256, kv_heads=2, ffn=96),
    "smollm2-135m": Shape(30, 576, 9, 49152, kv_heads=3, ffn=1536),
    "llama3.2-1b": Shape(16, 2048, 32, 128256, kv_heads=8, ffn=8192),
}


class Gpt2Block(nn.Module):
    """A pre-LN transformer block: attention, then an MLP with tanh GELU."""

    def __init__(self, shape, dropout):
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.dropout = dropout
        self.ln_1 = nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.attn_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.mlp_proj = nn.Linear(4 * width, width)
        for linear, std in [
            (self.c_attn, 0.02),
            (self.attn_proj, 0.02 / math.sqrt(2 * shape.layers)),
            (self.c_fc, 0.02),
            (self.mlp_proj, 0.02 / math.sqrt(2 * shape.layers)),
        ]:
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)

    def forward(self, x):
        rows, length, width = x.shape
        qkv = self.c_attn(self.ln_1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.attn_proj(y.transpose(1, 2).reshape(rows, length, width)), self.dropout)
        return x + F.dropout(self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")), self.dropout)


class Gpt2(nn.Module):
    """GPT-2 with learned positions and a tied head. Its output is the mean cross entropy."""

    def __init__(self, shape, positions, dropout=0.0):
        super().__init__()
        self.dropout = dropout
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.wpe = nn.Embedding(positions, shape.width)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)
        self.h = nn.ModuleList(Gpt2Block(shape, dropout) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)

    def forward(self, inputs, targets):
        x = F.dropout(self.wte(inputs) + self.wpe.weight[: inputs.shape[1]], self.dropout)
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def named_weights(self):
        """Names and tensors as in a Hugging Face folder: matrices have the input dimension first."""
        places = {"c_attn": "attn.c_attn", "attn_proj": "attn.c_proj", "c_fc": "mlp.c_fc", "mlp_proj": "mlp.c_proj"}
        for name, value in self.state_dict().items():
            for here, there in places.items():
                if f".{here}." in name:
                    name = name.replace(here, there)
                    value = value.t() if name.endswith("weight") else value
                    break
            yield f"transformer.{name}", value


class LlamaBlock(nn.Module):
    """RMS norm, attention with grouped queries and rotary positions, RMS norm, SwiGLU."""

    def __init__(self, shape):
        super().__init__()
        width, head = shape.width, shape.width // shape.heads
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.input_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.q_proj = nn.Linear(width, shape.heads * head, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * head, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * head, bias=False)
        self.o_proj = nn.Linear(shape.heads * head, width, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.gate_proj = nn.Linear(width, shape.ffn, bias=False)
        self.up_proj = nn.Linear(width, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, width, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x, cos, sin):
        rows, length, width = x.shape
        y = self.input_layernorm(x)
        q, k, v = (
            project(y).view(rows, length, heads, -1).transpose(1, 2)
            for project, heads in [
                (self.q_proj, self.heads), (self.k_proj, self.kv_heads), (self.v_proj, self.kv_heads)
            ]
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(rows, length, width))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


def rotate(x, cos, sin):
    """Rotates each pair of elements (i, i + head / 2) by its position's angle."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-right, left], dim=-1) * sin).to(x.dtype)


# The angles of Llama 3.2: of the pairs that turn less than once in 8,192 positions, 32 times slower ones.
ROPE = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}
THETA = 500000.0


def angles(length, head):
    """Cosines and sines [length, head] of Llama 3's scaled rotary positions."""
    frequencies = THETA ** -(torch.arange(0, head, 2, dtype=torch.float64) / head)
    turns = ROPE["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = ROPE["low_freq_factor"], ROPE["high_freq_factor"]
    part = ((turns - low) / (high - low)).clamp(0, 1)
    frequencies = frequencies * (part + (1 - part) / ROPE["factor"])
    at = torch.outer(torch.arange(length, dtype=torch.float64), frequencies).repeat(1, 2)
    return at.cos().float(), at.sin().float()


class Llama(nn.Module):
    """Llama 3.2 with a tied head. Its output is the mean cross entropy."""

    def __init__(self, shape, positions):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        cos, sin = angles(positions, shape.width // shape.heads)
        self.register_buffer("cos", cos.to(self.norm.weight.device), persistent=False)
        self.register_buffer("sin", sin.to(self.norm.weight.device), persistent=False)

    def forward(self, inputs, targets):
        x = self.embed_tokens(inputs)
        cos, sin = self.cos[: inputs.shape[1]], self.sin[: inputs.shape[1]]
        for block in self.layers:
            x = block(x, cos, sin)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def named_weights(self):
        """Names and tensors as in a Hugging Face folder."""
        for name, value in self.state_dict().items():
            for kind in ["q_proj", "k_proj", "v_proj", "o_proj"]:
                name = name.replace(f".{kind}.", f".self_attn.{kind}.")
            for kind in ["gate_proj", "up_proj", "down_proj"]:
                name = name.replace(f".{kind}.", f".mlp.{kind}.")
            yield f"model.{name}", value


def is_llama(shape):
    return shape.kv_heads > 0


def build(shape, positions, dropout=0.0):
    """A model with random weights, on the default device."""
    return Llama(shape, positions) if is_llama(shape) else Gpt2(shape, positions, dropout)


def config_json(shape, positions, dropout):
    if is_llama(shape):
        return {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
            "num_hidden_layers": shape.layers, "hidden_size": shape.width, "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads, "intermediate_size": shape.ffn, "vocab_size": shape.vocabulary,
            "max_position_embeddings": max(positions, 131072), "rms_norm_eps": 1e-5, "rope_theta": THETA,
            "rope_scaling": ROPE, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        }
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
        "n_layer": shape.layers, "n_embd": shape.width, "n_head": shape.heads, "n_positions": positions,
        "vocab_size": shape.vocabulary, "n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
        # transformers and `zero train` take 0.1 where these are missing.
        "embd_pdrop": dropout, "attn_pdrop": dropout, "resid_pdrop": dropout,
    }


DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def write_folder(path, model, shape, positions, tokens, dropout=0.0):
    """Writes config.json, model.safetensors and the tokens; returns the tokens' file."""
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "config.json"), "w") as file:
        json.dump(config_json(shape, positions, dropout), file, indent=2)

    # A header of names, then the bytes: https://github.com/huggingface/safetensors
    weights = list(model.named_weights())
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, value in weights:
        end = offset + value.numel() * value.element_size()
        header[name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(path, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, value in weights:
            value.contiguous().flatten().cpu().view(torch.uint8).numpy().tofile(file)

    wide = shape.vocabulary > 1 << 16
    data = os.path.join(path, "tokens.u32.bin" if wide else "tokens.bin")
    tokens.cpu().numpy().astype("<u4" if wide else "<u2").tofile(data)
    return data
