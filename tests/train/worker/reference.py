"""Textbook LoRA in fp64, written without a look at the engine: one document at a time, dense mask, autograd.

Reads the same folder as the engine does. Slow and plain on purpose; the oracle of test_exact.py.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class Reference:
    """`adapter`: PEFT name -> fp64 leaf tensors; `scale`: what B A is multiplied by."""

    def __init__(self, folder: Path, adapter: dict[str, Tensor], scale: float):
        self.config = json.loads((folder / "config.json").read_text())
        files = sorted(folder.glob("*.safetensors"))
        self.weights = {name: t.double() for file in files for name, t in load_file(file).items()}
        self.adapter = {name: tensor.detach().double().clone().requires_grad_() for name, tensor in adapter.items()}
        self.scale = scale
        self.family = self.config["model_type"]
        self.gemma = self.family.startswith("gemma")
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    def nll(self, tokens: list[int], trained: list[bool]) -> Tensor:
        """Sum over the trained tokens of -log p(token | tokens before it)."""
        total = torch.zeros((), dtype=torch.float64)
        logp = torch.log_softmax(self.logits(tokens), -1)
        for i in range(1, len(tokens)):
            if trained[i]:
                total = total - logp[i - 1, tokens[i]]
        return total

    def logits(self, tokens: list[int]) -> Tensor:
        c = self.config
        x = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        if self.gemma:
            x = x * math.sqrt(c["hidden_size"])
        x = x * c.get("embedding_multiplier", 1.0)
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}"
            sandwich = self.family in ("gemma2", "gemma3_text")
            if self.family == "olmo2":
                x = x + self.norm(self.attention(i, x), f"{p}.post_attention_layernorm")
                x = x + self.norm(self.mlp(i, x), f"{p}.post_feedforward_layernorm")
                continue
            a = self.attention(i, self.norm(x, f"{p}.input_layernorm"))
            if sandwich:
                x = x + self.norm(a, f"{p}.post_attention_layernorm")
                x = x + self.norm(
                    self.mlp(i, self.norm(x, f"{p}.pre_feedforward_layernorm")), f"{p}.post_feedforward_layernorm"
                )
            else:
                by = c.get("residual_multiplier", 1.0)
                x = x + by * a
                x = x + by * self.mlp(i, self.norm(x, f"{p}.post_attention_layernorm"))
        x = self.norm(x, "model.norm")
        head = self.weights.get("lm_head.weight")
        logits = x @ (self.weights["model.embed_tokens.weight"] if head is None else head).T
        logits = logits / c.get("logits_scaling", 1.0)
        cap = c.get("final_logit_softcapping")
        return logits if not cap else cap * torch.tanh(logits / cap)

    def linear(self, x: Tensor, i: int, block: str, name: str) -> Tensor:
        path = f"model.layers.{i}.{block}.{name}"
        y = x @ self.weights[f"{path}.weight"].T
        if f"{path}.bias" in self.weights:
            y = y + self.weights[f"{path}.bias"]
        a = self.adapter.get(f"base_model.model.{path}.lora_A.weight")
        if a is not None:
            b = self.adapter[f"base_model.model.{path}.lora_B.weight"]
            y = y + self.scale * ((x @ a.T) @ b.T)
        return y

    def norm(self, x: Tensor, name: str) -> Tensor:
        w = self.weights[f"{name}.weight"] + (1 if self.gemma else 0)
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * w

    def mlp(self, i: int, x: Tensor) -> Tensor:
        if self.family == "phi3":
            gate, up = self.linear(x, i, "mlp", "gate_up_proj").chunk(2, -1)
        else:
            gate, up = self.linear(x, i, "mlp", "gate_proj"), self.linear(x, i, "mlp", "up_proj")
        if self.gemma:
            act = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        else:
            act = gate / (1 + torch.exp(-gate))
        return self.linear(act * up, i, "mlp", "down_proj")

    def attention(self, i: int, x: Tensor) -> Tensor:
        c, n, hd = self.config, len(x), self.head_dim
        heads, kv = c["num_attention_heads"], c.get("num_key_value_heads", c["num_attention_heads"])
        if self.family == "phi3":
            q, k, v = self.linear(x, i, "self_attn", "qkv_proj").split([heads * hd, kv * hd, kv * hd], -1)
        else:
            q, k, v = (self.linear(x, i, "self_attn", f"{name}_proj") for name in "qkv")
        if self.family in ("olmo2",):
            q, k = (self.norm(y, f"model.layers.{i}.self_attn.{name}_norm") for y, name in ((q, "q"), (k, "k")))
        q, k, v = q.view(n, heads, hd), k.view(n, kv, hd), v.view(n, kv, hd)
        if self.family in ("qwen3", "gemma3_text"):
            p = f"model.layers.{i}.self_attn"
            q, k = self.norm(q, f"{p}.q_norm"), self.norm(k, f"{p}.k_norm")
        q, k = self.turn(i, q), self.turn(i, k)
        by = c.get("query_pre_attn_scalar") if self.family in ("gemma2", "gemma3_text") else hd
        out = []
        ago = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        window = self.window(i)
        allowed = (ago >= 0) & (ago < window) if window else ago >= 0
        for h in range(heads):
            g = h // (heads // kv)
            scores = q[:, h] @ k[:, g].T * c.get("attention_multiplier", 1 / math.sqrt(by))
            cap = c.get("attn_logit_softcapping")
            if cap:
                scores = cap * torch.tanh(scores / cap)
            out.append(torch.softmax(scores.masked_fill(~allowed, -torch.inf), -1) @ v[:, g])
        return self.linear(torch.cat(out, -1), i, "self_attn", "o_proj")

    def window(self, i: int) -> int | None:
        c = self.config
        if self.family in ("mistral", "phi3"):
            return c.get("sliding_window")
        if c.get("layer_types"):
            return c["sliding_window"] if c["layer_types"][i] == "sliding_attention" else None
        return None

    def turn(self, i: int, x: Tensor) -> Tensor:
        c = self.config
        if self.family == "smollm3" and not c["no_rope_layers"][i]:
            return x
        rope = c["rope_parameters"]
        if self.family == "gemma3_text":
            rope = rope[c["layer_types"][i]]
        size = int(self.head_dim * rope.get("partial_rotary_factor", 1.0))
        out = x.clone()
        at = torch.arange(len(x), dtype=torch.float64)
        for j in range(size // 2):
            f = rope["rope_theta"] ** (-2 * j / size)
            if rope["rope_type"] == "linear":
                f /= rope["factor"]
            if rope["rope_type"] == "llama3":
                long, old = 2 * math.pi / f, rope["original_max_position_embeddings"]
                smooth = (old / long - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
                smooth = min(1.0, max(0.0, smooth))
                f = (1 - smooth) * f / rope["factor"] + smooth * f
            cos, sin = torch.cos(at * f)[:, None], torch.sin(at * f)[:, None]
            a, b = x[..., j], x[..., j + size // 2]
            out[..., j], out[..., j + size // 2] = a * cos - b * sin, b * cos + a * sin
        return out
