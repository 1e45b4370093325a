"""Train a small convolutional network on scikit-learn's handwritten digits, elastically.

shoal run -n 2:4 examples/digits/train.py      members may join, leave and die
python examples/digits/train.py                alone: the same file, the same result
diff examples/digits/plain.py examples/digits/train.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import shoal.torch as shoal

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--size", type=int, default=128, help="samples in a global batch")
parser.add_argument("--width", type=int, default=32, help="channels of the first convolution")
parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
parser.add_argument("--out", default="digits.pt")
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(getattr(torch, args.dtype))

# 1,797 images of 8 x 8 pixels; every fifth one is kept for the test.
digits = load_digits()
images = torch.tensor(digits.images / 16.0).to(torch.get_default_dtype()).unsqueeze(1)
labels = torch.tensor(digits.target)
test = torch.arange(len(labels)) % 5 == 0
dataset = torch.utils.data.TensorDataset(images[~test], labels[~test])

model = nn.Sequential(
    nn.Conv2d(1, args.width, 3, padding=1),
    nn.GELU(),
    nn.Conv2d(args.width, 2 * args.width, 3, padding=1),
    nn.GELU(),
    nn.AvgPool2d(2),
    nn.Flatten(),
    nn.Linear(2 * args.width * 16, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * -(-len(dataset) // args.size))

run = shoal.join()
model, optimizer, scheduler = run.attach(model, optimizer, scheduler)
for x, y in run.batches(dataset, size=args.size, epochs=args.epochs, seed=0):
    loss = nn.functional.cross_entropy(model(x), y)
    run.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()

with torch.no_grad():
    accuracy = (model(images[test]).argmax(1) == labels[test]).double().mean().item()
print(f"accuracy {accuracy:.4f} on {int(test.sum())} images that it never saw")
run.save(args.out)
