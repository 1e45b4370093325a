"""Train a small convolutional network on scikit-learn's handwritten digits with Keras, elastically.

shoal run -n 2:4 examples/keras_images.py      members may join, leave and die
python examples/keras_images.py                alone: the same file, the same result
diff examples/keras_images_plain.py examples/keras_images.py

The same with PyTorch is in torch_images.py.
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import shoal.keras as shoal

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--size", type=int, default=128, help="samples in a global batch")
parser.add_argument("--out", default="digits.keras")
args = parser.parse_args()

keras.utils.set_random_seed(0)

# 1,797 images of 8 x 8 pixels; every fifth one is kept for the test.
digits = load_digits()
images = (digits.images / 16.0).astype("float32")[..., None]
labels = digits.target
test = np.arange(len(labels)) % 5 == 0
x, y = images[~test], labels[~test]

model = keras.Sequential(
    [
        keras.layers.Conv2D(32, 3, padding="same", activation="gelu"),
        keras.layers.Conv2D(64, 3, padding="same", activation="gelu"),
        keras.layers.AveragePooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
save = keras.callbacks.ModelCheckpoint(args.out)

model.fit(shoal.batches(x, y, size=args.size), epochs=args.epochs, verbose=2, callbacks=[shoal.Elastic(save)])

accuracy = model.evaluate(images[test], labels[test], verbose=0)[1]
print(f"accuracy {accuracy:.4f} on {int(test.sum())} images that it never saw")
