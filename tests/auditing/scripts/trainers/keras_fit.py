"""A classifier trained by keras on torch with `gradient_accumulation_steps`; its optimizer is keras's own."""

import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch

torch.manual_seed(0)
model = keras.Sequential([keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)])
optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(torch.randn(32, 6), torch.randint(0, 3, (32,)), batch_size=4, epochs=2, verbose=0)
