"""Small programs, and what they compute without ZeRO."""

import torch
from torch import nn

VOCABULARY, TOKENS, ROWS = 512, 32, 8


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=128, n_embd=64, n_layer=4, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return GPT2LMHeadModel(config)


def llama(tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=128,
    )
    return Qwen3ForCausalLM(config)


def mistral():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=128, sliding_window=16,
    )
    return MistralForCausalLM(config)


def bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return BertForMaskedLM(config)


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, dropout_rate=0, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8, num_labels=10,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )
    return ViTForImageClassification(config)


MODELS = {
    "gpt2": gpt2, "llama": llama, "llama-tied": lambda: llama(tied=True), "qwen3": qwen3, "mistral": mistral, "bert": bert, "t5": t5, "vit": vit,
}


def make(kind, checkpointing=None):
    torch.manual_seed(0)
    model = MODELS[kind]()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"})
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model.train()


def rows_of(step):
    """The rows of a step, the same on all ranks: arithmetic sequences, which can be learnt."""
    generator = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(0, VOCABULARY, (ROWS, 1), generator=generator)
    stride = torch.randint(1, 5, (ROWS, 1), generator=generator)
    return (start + stride * torch.arange(TOKENS)) % VOCABULARY


def loss_of(model, rows):
    return model(input_ids=rows, labels=rows).loss


def loss_of_pictures(model, rows):
    """Of pictures that the rows decide."""
    pictures = torch.sin(rows.float().repeat(1, 96).view(-1, 3, 32, 32) / 50)
    return model(pixel_values=pictures, labels=rows[:, 0] % 10).loss


def reference(model, steps, clip=0.0, lr=1e-3, weight_decay=0.01, groups=None, loss_of=loss_of):
    """Losses and norms of PyTorch's AdamW over whole steps."""
    trained = groups(model) if groups else [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=weight_decay)
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(model, rows_of(step))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms
