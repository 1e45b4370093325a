"""Train a small convolutional network on scikit-learn's handwritten digits, with PyTorch alone.

python examples/torch_images_plain.py
diff examples/torch_images_plain.py examples/torch_images.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--size", type=int, default=128, help="samples in a global batch")
args = parser.parse_args()

torch.manual_seed(0)

# 1,797 images of 8 x 8 pixels; every fifth one is kept for the test.
digits = load_digits()
images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
labels = torch.tensor(digits.target)
test = torch.arange(len(labels)) % 5 == 0
dataset = torch.utils.data.TensorDataset(images[~test], labels[~test])

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.GELU(),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.GELU(),
    nn.AvgPool2d(2),
    nn.Flatten(),
    nn.Linear(64 * 16, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

loader = torch.utils.data.DataLoader(dataset, args.size, shuffle=True)
for x, y in (batch for _ in range(args.epochs) for batch in loader):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

with torch.no_grad():
    accuracy = (model(images[test]).argmax(1) == labels[test]).double().mean().item()
print(f"accuracy {accuracy:.4f} on {int(test.sum())} images that it never saw")
