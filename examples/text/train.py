"""Train a tiny character transformer to add numbers, on generated sentences.

shoal run -n 2:4 examples/text/train.py
python examples/text/train.py

Sentences differ in length, so a share's loss is weighted by its characters, not by its sentences: the gradient is
that of the mean over all characters of the global batch, however the batch is cut.
"""

import argparse
import random

import torch
from torch import nn

import shoal.torch as shoal

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--sentences", type=int, default=4000)
parser.add_argument("--size", type=int, default=64, help="sentences in a global batch")
parser.add_argument("--out", default="text.pt")
args = parser.parse_args()

WORDS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen".split()
WORDS += "fifteen sixteen seventeen eighteen".split()
ALPHABET = "\0\n " + "abcdefghijklmnopqrstuvwxyz"
LENGTH = 36


def encode(sentence: str) -> list[int]:
    return [ALPHABET.index(letter) for letter in sentence]


class Sentences(torch.utils.data.Dataset):
    """Sentence i is a pure function of i: (characters, the characters that follow), padded with zeros."""

    def __len__(self) -> int:
        return args.sentences

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = random.Random(index)
        a, b = draw.randrange(10), draw.randrange(10)
        codes = torch.tensor(encode(f"{WORDS[a]} plus {WORDS[b]} is {WORDS[a + b]}\n"))
        padded = nn.functional.pad(codes, (0, LENGTH + 1 - len(codes)))
        return padded[:-1], padded[1:]


class Transformer(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.blocks(self.letters(x) + self.places[: x.shape[1]], mask=mask, is_causal=True))


def complete(model: nn.Module, text: str) -> str:
    """Return the most likely continuation, letter by letter, up to the end of the line."""
    codes = encode(text)
    with torch.no_grad():
        while len(codes) < LENGTH and ALPHABET[codes[-1]] != "\n":
            codes.append(int(model(torch.tensor([codes]))[0, -1].argmax()))
    return "".join(ALPHABET[code] for code in codes).strip()


torch.manual_seed(0)
model = Transformer()
steps = args.epochs * -(-args.sentences // args.size)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps + 1)

run = shoal.join()
model, optimizer, scheduler = run.attach(model, optimizer, scheduler)
for x, y in run.batches(Sentences(), size=args.size, epochs=args.epochs, seed=0):
    characters = (y != 0).sum()
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=0)
    run.backward(loss, weight=characters)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    run.log(loss=loss)

model.eval()
answers = [
    (f"{WORDS[a]} plus {WORDS[b]} is {WORDS[a + b]}", complete(model, f"{WORDS[a]} plus {WORDS[b]} is "))
    for a in range(10)
    for b in range(10)
]
right = sum(expected == given for expected, given in answers)
print(f"{right} of {len(answers)} sums right; for example: {answers[78][1]}")
run.save(args.out)
