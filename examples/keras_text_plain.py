"""Train a tiny character transformer to add numbers, on generated sentences, with Keras alone.

python examples/keras_text_plain.py
diff examples/keras_text_plain.py examples/keras_text.py
"""

import argparse
import random

import keras
import numpy as np
from keras import layers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--sentences", type=int, default=4000)
parser.add_argument("--size", type=int, default=64, help="sentences in a global batch")
args = parser.parse_args()

WORDS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen".split()
WORDS += "fifteen sixteen seventeen eighteen".split()
ALPHABET = "\0\n " + "abcdefghijklmnopqrstuvwxyz"
LENGTH = 36


def encode(sentence):
    return [ALPHABET.index(letter) for letter in sentence]


def padded(codes):
    return np.array([one + [0] * (LENGTH + 1 - len(one)) for one in codes])


def block(x, width, heads):
    """Apply causal attention, then two dense layers to each letter."""
    inside = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(heads, width // heads)(inside, inside, use_causal_mask=True)
    inside = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
    return x + layers.Dense(width)(inside)


def transformer(width=64, heads=4, depth=2):
    letters = keras.Input((LENGTH,), dtype="int32")
    places = layers.Embedding(LENGTH, width)(keras.ops.arange(LENGTH))
    x = layers.Embedding(len(ALPHABET), width)(letters) + places
    for _ in range(depth):
        x = block(x, width, heads)
    return keras.Model(letters, layers.Dense(len(ALPHABET))(x))


def complete(model, texts):
    """Return the most likely continuations, letter by letter, up to the end of the line."""
    codes = [encode(text) for text in texts]
    while any(one[-1] != ALPHABET.index("\n") and len(one) < LENGTH for one in codes):
        likely = model.predict_on_batch(padded(codes)[:, :-1]).argmax(-1)
        for number, one in enumerate(codes):
            if one[-1] != ALPHABET.index("\n") and len(one) < LENGTH:
                one.append(int(likely[number, len(one) - 1]))
    return ["".join(ALPHABET[code] for code in one).strip() for one in codes]


keras.utils.set_random_seed(0)
draw = random.Random(0)
sums = [(draw.randrange(10), draw.randrange(10)) for _ in range(args.sentences)]
codes = padded(encode(f"{WORDS[a]} plus {WORDS[b]} is {WORDS[a + b]}\n") for a, b in sums)
# Sentences differ in length. Weights, not a mask, say what counts: so the loss is the same however a batch is cut.
x, y, weight = codes[:, :-1], codes[:, 1:], (codes[:, 1:] != 0).astype("float32")

model = transformer()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.AdamW(2e-3, clipnorm=1.0), loss)

model.fit(x, y, sample_weight=weight, batch_size=args.size, epochs=args.epochs, verbose=2)

asked = [(a, b) for a in range(10) for b in range(10)]
given = complete(model, [f"{WORDS[a]} plus {WORDS[b]} is " for a, b in asked])
right = sum(one == f"{WORDS[a]} plus {WORDS[b]} is {WORDS[a + b]}" for one, (a, b) in zip(given, asked, strict=True))
print(f"{right} of {len(asked)} sums right; for example: {given[78]}")
